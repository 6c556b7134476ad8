"""A flat range of a stack of matrices as runs of whole and of cut rows, and sums over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

_BLOCK = 1 << 18  # elements that are widened to float64 at a time


class RowSpan(NamedTuple):
    """Elements [start, stop) of a flat stack of matrices: `rows` whole rows of one matrix, or a part of one row.

    first_row is counted from the first row of the first matrix on.
    """

    start: int
    stop: int
    matrix: int
    first_row: int
    rows: int
    first_column: int


def row_spans(start: int, stop: int, rows: int, columns: int) -> Iterator[RowSpan]:
    """Cuts elements [start, stop) of a flat [n, rows, columns] into spans."""
    while start < stop:
        row, column = divmod(start, columns)
        matrix = row // rows
        count = min((matrix + 1) * rows, stop // columns) - row if column == 0 else 0
        end = start + count * columns if count > 0 else min(stop, (row + 1) * columns)
        yield RowSpan(start, end, matrix, row, max(count, 1), column)
        start = end


def sums_of_squares(values: torch.Tensor, start: int, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares of the rows [n, rows] and of the columns [n, columns] of n matrices, fp64.

    values: elements [start, start + len(values)) of a flat tensor of `shape` [..., rows, columns]; others count as 0.
    The order of summation depends on start and length alone.
    """
    *batch, rows, columns = shape
    count = torch.Size(batch).numel()
    of_rows = torch.zeros(count * rows, dtype=torch.float64, device=values.device)
    of_columns = torch.zeros(count, columns, dtype=torch.float64, device=values.device)
    for span in row_spans(start, start + values.numel(), rows, columns):
        block = values[span.start - start : span.stop - start].view(span.rows, -1)
        at_once = max(1, _BLOCK // block.size(1))
        for first in range(0, span.rows, at_once):
            wide = block[first : first + at_once].to(torch.float64, copy=True)
            wide.mul_(wide)
            row = span.first_row + first
            of_rows[row : row + wide.size(0)] += wide.sum(1)
            of_columns[span.matrix, span.first_column : span.first_column + wide.size(1)] += wide.sum(0)
    return of_rows.view(count, rows), of_columns
