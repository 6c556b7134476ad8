"""What a rule over whole parameters asks of the other ranks: sums, and whole tensors on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from zeropg.optim.part import Part


@dataclass
class Piece(Part):
    """A Part whose gradient and state, too, are of no more than the elements that this rank updates.

    counted: which of these this rank contributes to sums, so that each element counts once.
    ranges: by rank, the elements [start, stop) of the parameter that each rank updates.
    """

    counted: slice
    ranges: Sequence[tuple[int, int]]

    def count(self, values: torch.Tensor) -> torch.Tensor:
        """Those of `values`, one for each element of this piece, that this rank contributes to sums. Flat."""
        return values.reshape(-1)[self.counted]


# Of a whole tensor in the parameter's shape; returns one of the same shape and dtype.
OfWhole = Callable[[Piece, torch.Tensor], torch.Tensor]


class Peers(Protocol):
    """The ranks that hold the same parameters. They all call the same methods, with pieces in the same order."""

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over what each rank counts become those over all ranks, in place."""

    def map_wholes(
        self, pieces: Sequence[Piece], values: Sequence[torch.Tensor], function: OfWhole, costs: Sequence[float]
    ) -> list[torch.Tensor]:
        """Returns this rank's elements of function(piece, whole), which one rank computes for each piece.

        values: this rank's elements of each whole; all of one dtype. costs: of the calls, to balance them by.
        """


class Alone:
    """One process, which updates every parameter whole."""

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def map_wholes(
        self, pieces: Sequence[Piece], values: Sequence[torch.Tensor], function: OfWhole, costs: Sequence[float]
    ) -> list[torch.Tensor]:
        return [
            function(piece, value.view(piece.parameter.shape)).reshape(value.shape)
            for piece, value in zip(pieces, values, strict=True)
        ]


class _GroupPeers:
    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums, group=self._group)
        return sums


class ReplicatedPeers(_GroupPeers):
    """Ranks that each update every parameter whole (stage 0): what one computes is broadcast."""

    def map_wholes(
        self, pieces: Sequence[Piece], values: Sequence[torch.Tensor], function: OfWhole, costs: Sequence[float]
    ) -> list[torch.Tensor]:
        by_rank = assign(costs, self._group.size())
        mine = by_rank[self._group.rank()]
        results = [torch.empty_like(value) for value in values]
        for index in mine:
            piece = pieces[index]
            results[index].copy_(function(piece, values[index].view(piece.parameter.shape)).reshape(-1))
        works = [
            dist.broadcast(results[index].view(torch.uint8), group_src=rank, group=self._group, async_op=True)
            for rank, indices in enumerate(by_rank)
            for index in indices
        ]
        for work in works:
            assert work is not None  # of a rank in the group
            work.wait()
        return results


class ShardedPeers(_GroupPeers):
    """Ranks that each update their own elements (stages 1 to 3): wholes meet on one rank, and part, by all-to-all."""

    def map_wholes(
        self, pieces: Sequence[Piece], values: Sequence[torch.Tensor], function: OfWhole, costs: Sequence[float]
    ) -> list[torch.Tensor]:
        if not pieces:
            return []
        by_rank = assign(costs, self._group.size())
        order = [index for indices in by_rank for index in indices]
        mine = [pieces[index] for index in by_rank[self._group.rank()]]
        wholes = [values[0].new_empty(piece.parameter.numel()) for piece in mine]
        parts = [  # by rank, as they travel
            [whole[slice(*piece.ranges[rank])] for whole, piece in zip(wholes, mine, strict=True)]
            for rank in range(self._group.size())
        ]
        to_rank = [sum(values[index].numel() for index in indices) for indices in by_rank]
        from_rank = [sum(part.numel() for part in theirs) for theirs in parts]
        flat_parts = [part for theirs in parts for part in theirs]
        gathered = self._all_to_all([values[index] for index in order], to_rank, from_rank)
        for part, value in zip(flat_parts, gathered.split([part.numel() for part in flat_parts]), strict=True):
            part.copy_(value)
        for piece, whole in zip(mine, wholes, strict=True):
            whole.copy_(function(piece, whole.view(piece.parameter.shape)).reshape(-1))
        scattered = self._all_to_all([values[0][:0], *flat_parts], from_rank, to_rank)
        found = dict(zip(order, scattered.split([values[index].numel() for index in order]), strict=True))
        return [found[index] for index in range(len(pieces))]

    def _all_to_all(self, values: Sequence[torch.Tensor], to_rank: list[int], from_rank: list[int]) -> torch.Tensor:
        """Sends `values`, one after another, cut by elements into what each rank gets; as bytes, for every backend."""
        sent = torch.cat(list(values))
        received = sent.new_empty(sum(from_rank))
        width = sent.element_size()
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [numel * width for numel in from_rank],
            [numel * width for numel in to_rank],
            group=self._group,
        )
        return received


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Returns, by rank, the indices of its costs: the largest first, each to the rank with the least so far."""
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = loads.index(min(loads))
        by_rank[rank].append(index)
        loads[rank] += costs[index]
    return by_rank
