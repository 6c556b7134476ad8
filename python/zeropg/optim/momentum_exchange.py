"""Momenta averaged over the ranks in few bits: what `OneBitAdam`, `OneBitLamb` and `DGC` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeropg.compression.codec import Codec
from zeropg.compression.state import CONTRIBUTION_HOP, State

# A call costs time whatever its size, and encoding is fastest in the cache.
_BUCKET_ELEMENTS = 1 << 20
_MOST_IN_FLIGHT = 2  # one travels while the next is filled; more would only hold memory


class Momentum(NamedTuple):
    """A whole momentum of this rank. Encoded divided by `scale`, so that tensors in one bucket are of one size."""

    parameter: torch.Tensor
    values: torch.Tensor
    scale: float = 1.0


class MomentumExchange:
    """Averages the momenta of one model over a group of zeropg; keeps what the encodings lose.

    weights_over: the group whose ranks each update their own part of the weights; None: every rank updates all.

    Raises ValueError for a group of another backend.
    """

    def __init__(
        self,
        codec: Codec,
        model: torch.nn.Module,
        group: dist.ProcessGroup,
        *,
        weights_over: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self._weights_over = weights_over
        self.state = State(codec, process_group=group, model=model)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    def encodes(self, parameter: torch.Tensor) -> bool:
        """Whether the momentum of `parameter` travels encoded: matrices, of a size that pays."""
        return self.state.encodes(parameter)

    def average(self, momenta: Sequence[Momentum]) -> None:
        """Replaces each tensor by its average over the ranks: all get the same bits. Collective."""
        small = [momentum for momentum in momenta if not self.encodes(momentum.parameter)]
        self._average_exactly([momentum.values for momentum in small])
        in_flight: list[tuple[Any, torch.Tensor, list[Momentum]]] = []
        for bucket in _buckets([momentum for momentum in momenta if self.encodes(momentum.parameter)]):
            flat = torch.cat([momentum.values.reshape(-1).float() for momentum in bucket])
            torch._foreach_div_(_parts_of(flat, bucket), [momentum.scale for momentum in bucket])
            work = self.state.all_reduce(flat, [momentum.parameter for momentum in bucket])
            in_flight.append((work, flat, bucket))
            if len(in_flight) == _MOST_IN_FLIGHT:
                _finish(*in_flight.pop(0))
        for entry in in_flight:
            _finish(*entry)

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the elements that this rank updates become those over whole tensors. Collective."""
        if self._weights_over is not None:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=self._weights_over)
        return sums

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The same for maxima."""
        if self._weights_over is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._weights_over)
        return values

    def debts(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """What this rank has not sent yet, by parameter: (first element, values), live."""
        debts: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for name, hop, start, values in [] if self.state.residuals is None else self.state.residuals.segments():
            if hop == CONTRIBUTION_HOP:
                debts.setdefault(name, []).append((start, values))
        return debts

    def _average_exactly(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)
            _put_back(flat, tensors)


def _buckets(momenta: Sequence[Momentum]) -> Iterator[list[Momentum]]:
    bucket: list[Momentum] = []
    numel = 0
    for momentum in momenta:
        if bucket and numel + momentum.values.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, numel = [], 0
        bucket.append(momentum)
        numel += momentum.values.numel()
    if bucket:
        yield bucket


def _finish(work: Any, flat: torch.Tensor, bucket: Sequence[Momentum]) -> None:
    work.wait()
    torch._foreach_mul_(_parts_of(flat, bucket), [momentum.scale for momentum in bucket])
    _put_back(flat, [momentum.values for momentum in bucket])


def _parts_of(flat: torch.Tensor, bucket: Sequence[Momentum]) -> list[torch.Tensor]:
    return list(flat.split([momentum.values.numel() for momentum in bucket]))


def _put_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)])
