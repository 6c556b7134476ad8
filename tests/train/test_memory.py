"""ZeRO's formula against the figures in its paper, and the table."""

from __future__ import annotations

import pytest
import torch

from zeropg.train.memory import memory_table, resident_bytes, zero_formula


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_formula_gives_the_figures_of_the_zero_paper(stage, gigabytes):
    formula = zero_formula(stage, 64, 7_500_000_000, torch.bfloat16)
    assert sum(formula.values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 16), (1, 12), (2, 10), (3, 8)])
def test_formula_of_float32_on_two_ranks(stage, bytes_each):
    assert sum(zero_formula(stage, 2, 1000, torch.float32).values()) == 1000 * bytes_each


def test_table_sums_the_formulas_classes_and_shows_the_others_apart():
    measured = {"parameters": 2 << 20, "gradients": 2 << 20, "optimizer": 6 << 20, "gathered": 1 << 20}
    lines = memory_table(measured, zero_formula(3, 2, 1 << 20, torch.bfloat16), 1 << 20, 300 << 20).splitlines()
    assert lines[4].split() == ["sum", "10.00", "MiB", "8.00", "MiB", "10.00"]
    assert lines[5].split() == ["gathered", "1.00", "MiB", "1.00"]
    assert lines[6].split() == ["whole", "process", "(PSS)", "300.00", "MiB"]


def test_resident_bytes_are_those_of_a_process_with_torch():
    assert 50 << 20 < resident_bytes() < 100 << 30
