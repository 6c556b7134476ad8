"""Sizes and counts as people write and read them."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path


def size(count: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def byte_count(text: str) -> int:
    """An argument that is a size in bytes: a number with an optional K, M or G (powers of 1024): 64K, 64KB or 64KiB."""
    found = re.fullmatch(r"(\d+)([KMG]?)I?B?", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or 64K, 4M, 1G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


def plot_file(text: str) -> Path:
    """An argument that is a file to draw into."""
    file = Path(text)
    if file.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither an .svg nor a .png file")
    return file


def count(text: str) -> int:
    """An argument that is a positive count: 7e9, 7B or 350M (powers of 1000)."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if factor != 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 7e9, 7B or 350M") from None
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; expected at least one")
    return round(number)
