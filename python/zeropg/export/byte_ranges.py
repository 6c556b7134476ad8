"""Where a rank's flat values of a tensor stand in the file that has the whole one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zeropg.rank_io.parallel_files import ByteRange
from zeropg.tensor_parallel.pieces import Cut

_ALONE_BYTES = 1 << 20  # runs of this size are no rows: they may be larger than what is sent, or staged, at once


def byte_ranges(
    file: int, offset: int, cut: Cut, start: int, flat: torch.Tensor, dtype: torch.dtype
) -> Iterator[ByteRange]:
    """Yields elements [start, start + len(flat)) of this rank's part of a tensor that begins at `offset` of a file."""
    width = dtype.itemsize
    for runs in cut.runs(start, start + flat.numel()):
        values = flat[runs.local - start : runs.local - start + runs.repeats * runs.numel]
        if runs.repeats > 1 and runs.numel * width < _ALONE_BYTES:
            rows = values.view(runs.repeats, runs.numel)
            yield ByteRange(file, offset + runs.whole * width, rows, dtype, runs.stride * width)
            continue
        for i, run in enumerate(values.split(runs.numel)):
            yield ByteRange(file, offset + (runs.whole + i * runs.stride) * width, run, dtype)
