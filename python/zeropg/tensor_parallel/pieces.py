"""Which elements of a whole tensor a rank's part of it has, both counted flat, in C order. No communication.

A rank keeps flat ranges of its part; files and other programs have whole tensors. An element comes after another one in
the part where it does so in the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from zeropg.tensor_parallel.distributed import part_of

# Elements between two runs that are read along with them: about a chunk of a file, of which a reader takes the whole.
_MOST_GAP = 1 << 16

# (start, stop) -> (first element, values) of elements [start, stop) of a flat tensor, in order.
Source = Callable[[int, int], Iterator[tuple[int, torch.Tensor]]]


class Runs(NamedTuple):
    """Runs of `numel` neighbours each: elements [local + i * numel, local + (i + 1) * numel) of the part, for i <
    repeats, are elements [whole + i * stride, whole + i * stride + numel) of the whole tensor."""

    local: int
    whole: int
    numel: int
    repeats: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Cut:
    """A part of a tensor of `shape`: its elements with offsets[d] <= index[d] < offsets[d] + sizes[d]."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    def runs(self, start: int, stop: int) -> Iterator[Runs]:
        """Cuts elements [start, stop) of the part into runs, in order."""
        if start >= stop:
            return
        last = max((dim for dim, size in enumerate(self.shape) if self.sizes[dim] != size), default=None)
        if last is None:
            yield Runs(start, start, stop - start)
            return
        # Neighbours in the part are neighbours in the whole as long as no index before `last` changes: in a row.
        inner = math.prod(self.shape[last + 1 :])
        numel, stride, skipped = self.sizes[last] * inner, self.shape[last] * inner, self.offsets[last] * inner
        rows = Cut(self.shape[:last], self.offsets[:last], self.sizes[:last])
        first, after = -(-start // numel), stop // numel  # whole rows
        if first > after:
            yield Runs(start, rows._whole_of(after) * stride + skipped + start - after * numel, stop - start)
            return
        if head := first * numel - start:
            yield Runs(start, rows._whole_of(first - 1) * stride + skipped + numel - head, head)
        for each in rows.runs(first, after):
            for i in range(each.repeats):
                row, place = each.local + i * each.numel, each.whole + i * each.stride
                yield Runs(row * numel, place * stride + skipped, numel, each.numel, stride)
        if tail := stop - after * numel:
            yield Runs(after * numel, rows._whole_of(after) * stride + skipped, tail)

    def neighbours(self, start: int, stop: int) -> int | None:
        """Which element of the whole elements [start, stop) of the part begin with; None where they are not one run."""
        runs = list(islice(self.runs(start, stop), 2))
        return runs[0].whole if len(runs) == 1 and runs[0].repeats == 1 else None

    def read(self, source: Source, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values) of elements [start, stop) of the part, in order.

        source: of the whole tensor. Runs that lie close together are read with what is between them.
        """
        for runs in self.runs(start, stop):
            if runs.repeats > 1 and runs.stride - runs.numel <= _MOST_GAP:
                end = runs.whole + (runs.repeats - 1) * runs.stride + runs.numel
                for first, values in source(runs.whole, end):
                    yield from self.pick(first, values)
                continue
            for i in range(runs.repeats):
                local, whole = runs.local + i * runs.numel, runs.whole + i * runs.stride
                for first, values in source(whole, whole + runs.numel):
                    yield local + first - whole, values

    def pick(self, first: int, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values) of what the part has of elements [first, first + len(values)) of the whole.

        values: flat, contiguous.
        """
        for runs in self.runs(self._before(first), self._before(first + values.numel())):
            yield runs.local, _strided(values, runs.whole - first, runs).reshape(-1)

    def put(self, whole: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Sets elements [start, start + len(values)) of the part in the flat, contiguous whole tensor."""
        for runs in self.runs(start, start + values.numel()):
            at = runs.local - start
            own = values[at : at + runs.repeats * runs.numel].view(runs.repeats, runs.numel)
            _strided(whole, runs.whole, runs).copy_(own)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the whole's shape; a view."""
        return whole[tuple(slice(o, o + size) for o, size in zip(self.offsets, self.sizes, strict=True))]

    def _whole_of(self, element: int) -> int:
        """Which element of the whole tensor an element of the part is."""
        place, stride = 0, 1
        for size, offset, own in zip(reversed(self.shape), reversed(self.offsets), reversed(self.sizes), strict=True):
            element, index = divmod(element, own)
            place += (offset + index) * stride
            stride *= size
        return place

    def _before(self, element: int) -> int:
        """How many elements of the part come before an element of the whole tensor."""
        count, stride, own = 0, math.prod(self.shape), math.prod(self.sizes)
        if element >= stride or own == 0:
            return own
        for size, offset, own_size in zip(self.shape, self.offsets, self.sizes, strict=True):
            stride, own = stride // size, own // own_size
            index, element = divmod(element, stride)
            count += min(max(index - offset, 0), own_size) * own
            if not offset <= index < offset + own_size:
                break
        return count


def _strided(flat: torch.Tensor, first: int, runs: Runs) -> torch.Tensor:
    """Runs that begin at an element of a flat tensor: [repeats, numel]."""
    if runs.repeats == 1:
        return flat[first : first + runs.numel].view(1, -1)
    return flat[first:].as_strided((runs.repeats, runs.numel), (runs.stride, 1))


def whole(shape: Sequence[int]) -> Cut:
    """All of a tensor."""
    return Cut(tuple(shape), (0,) * len(shape), tuple(shape))


def cut_of(tensor: torch.Tensor) -> Cut:
    """This rank's part of a tensor that `fully_shard` has taken; all of a plain one."""
    part = part_of(tensor)
    return Cut(tuple(tensor.shape), part.offsets, part.sizes)
