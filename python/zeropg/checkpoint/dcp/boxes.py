"""Flat ranges as boxes: a shard is a range of a tensor's elements in C order, and DCP knows n-dimensional boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Elements offsets[d] <= index[d] < offsets[d] + sizes[d]: in C order neighbours, from the `start`-th on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cuts elements [start, stop) of a tensor of this shape, counted in C order, into boxes, in order.

    They are at most 2 * len(shape) - 1: the end of a row, whole rows, the beginning of a row, and so on inside of rows.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), (), 0, 1)
        return
    row_numel = math.prod(shape[1:])
    first_whole, after_whole = -(-start // row_numel), stop // row_numel
    if first_whole > after_whole:  # inside of one row
        yield from _in_row(shape, after_whole, start, stop)
        return
    yield from _in_row(shape, first_whole - 1, start, first_whole * row_numel)
    if first_whole < after_whole:
        sizes = (after_whole - first_whole, *shape[1:])
        offsets = (first_whole, *(0 for _ in shape[1:]))
        yield Box(offsets, sizes, first_whole * row_numel, after_whole * row_numel)
    yield from _in_row(shape, after_whole, after_whole * row_numel, stop)


def covering_rows(shape: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Returns a range around [start, stop) that is one box, if it is at most an eighth longer; else the same range.

    To read one box takes one pass over a file's chunk, where the ends of rows apart take three.
    """
    for dim in range(len(shape)):
        row_numel = math.prod(shape[dim + 1 :])
        if start // row_numel < (stop - 1) // row_numel:
            first, last = start // row_numel * row_numel, -(-stop // row_numel) * row_numel
            return (first, last) if 8 * (last - first) <= 9 * (stop - start) else (start, stop)
    return start, stop


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    begin = row * math.prod(shape[1:])
    for box in boxes_of(shape[1:], start - begin, stop - begin):
        yield Box((row, *box.offsets), (1, *box.sizes), begin + box.start, begin + box.stop)
