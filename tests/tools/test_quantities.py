"""Sizes and counts on command lines."""

from __future__ import annotations

import argparse

import pytest

from zeropg.tools.quantities import byte_count, count, size


@pytest.mark.parametrize(("text", "value"), [("8", 8), ("64K", 65536), ("4M", 4 << 20), ("1gb", 1 << 30)])
def test_sizes_are_read_with_their_units(text, value):
    assert byte_count(text) == value


@pytest.mark.parametrize(("text", "value"), [("7e9", 7_000_000_000), ("7B", 7_000_000_000), ("1.5M", 1_500_000)])
def test_counts_are_read_with_their_units(text, value):
    assert count(text) == value


@pytest.mark.parametrize("parse", [byte_count, count])
@pytest.mark.parametrize("text", ["", "many", "1X", "-1", "K", "nan"])
def test_what_is_no_size_is_refused(parse, text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse(text)


@pytest.mark.parametrize(("value", "text"), [(5, "5 bytes"), (1536, "1.5 KiB"), (8 << 20, "8 MiB"), (1 << 41, "2 TiB")])
def test_sizes_are_written_for_people(value, text):
    assert size(value) == text
