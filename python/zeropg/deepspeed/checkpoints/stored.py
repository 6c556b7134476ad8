"""Tensors of a checkpoint as they are stored: in one piece, or in runs in the files of several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from zeropg.deepspeed.checkpoints.pickles import read_pickle

_PIECE_BYTES = 4 << 20


class Stored(Protocol):
    """A whole tensor that can be read by parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values) of elements [start, stop) of the flat tensor, some MiB at a time, in order."""


@dataclass(frozen=True)
class Runs:
    """A tensor whose flat elements lie in runs. runs: (first element, flat values that are mapped, not read)."""

    shape: tuple[int, ...]
    runs: tuple[tuple[int, torch.Tensor], ...]
    dtype: torch.dtype

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        for first, values in self.runs:
            begin, end = max(start, first), min(stop, first + values.numel())
            if begin < end:
                yield from _cut(values[begin - first : end - first], begin)


@dataclass(frozen=True)
class InFile:
    """A tensor in a file of its own, which is open only while it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        yield from _cut(tensor_in(self.path).reshape(-1)[start:stop], start)


def _cut(values: torch.Tensor, start: int) -> Iterator[tuple[int, torch.Tensor]]:
    for part in values.split(_PIECE_BYTES // values.element_size()) if values.numel() else ():
        yield start, part
        start += part.numel()


def same_values(one: Stored, other: Stored) -> bool:
    """Reads both tensors, some MiB at a time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    numel, step = math.prod(one.shape), _PIECE_BYTES // one.dtype.itemsize
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        here, there = (torch.cat([values for _, values in each.pieces(start, stop)]) for each in (one, other))
        if not torch.equal(here, there):
            return False
    return True


def whole(tensor: torch.Tensor) -> Runs:
    """A tensor that is stored in one piece."""
    return Runs(tuple(tensor.shape), ((0, tensor.detach().reshape(-1)),), tensor.dtype)


def tensor_in(path: Path) -> torch.Tensor:
    """Returns the tensor of a universal checkpoint's file. Raises ValueError where it holds something else."""
    content = read_pickle(path)
    if isinstance(content, dict):
        content = content.get("param")
    if not isinstance(content, torch.Tensor):
        raise ValueError(f"'{path}' holds no tensor, expected one parameter's values")
    return content


def in_file(path: Path, shape: tuple[int, ...] | None) -> InFile:
    """Looks at a universal checkpoint's file. shape: the parameter's, where it is known; else the file's counts.

    Raises ValueError for a tensor of another size.
    """
    tensor = tensor_in(path)
    if shape is not None and tensor.numel() != math.prod(shape):
        raise ValueError(f"'{path}' holds {tensor.numel()} elements, expected {math.prod(shape)} for {list(shape)}")
    return InFile(tuple(tensor.shape) if shape is None else shape, tensor.dtype, path)
