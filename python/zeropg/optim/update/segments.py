"""What the core shows of a flat buffer to optimizers, and the part of each parameter in it that a rank updates."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zeropg._native import _C
from zeropg.optim.update.entries import is_per_element
from zeropg.tensor_parallel.distributed import is_distributed, local_of, part_of, placements_text
from zeropg.tensor_parallel.pieces import cut_of


class FlatGroup(Protocol):
    """What the core shows of one flat buffer to the optimizer: `_C.FlatGroup`."""

    # The range that this rank updates; None where it is in a tier.
    @property
    def master(self) -> torch.Tensor | None: ...

    master_start: int  # where that range begins in the flat buffer
    master_numel: int
    master_dtype: torch.dtype
    tiered_master: _C.TieredVector | None
    unit_name: str
    parameter_out: torch.Tensor | None
    total_numel: int  # of the flat buffer; rank r owns the r-th of world_size equal slices
    is_trainable: bool
    segments: Sequence[tuple[torch.Tensor, str, int, int]]  # parameter, name, start, stop in the master
    slots: Sequence[tuple[Sequence[str], torch.Tensor, int, int]]  # names, parameter, offset in the buffer, numel
    local_shards: Sequence[tuple[str, int, int, int]]  # name, first in the master, start, stop in the parameter

    def grad(self) -> torch.Tensor | None: ...
    def has_grad(self, parameter: torch.Tensor) -> bool: ...


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that this rank updates.

    Elements [start, stop) of the flat group's master are elements [offset, offset + stop - start) of the flattened
    parameter.
    """

    parameter: torch.Tensor
    name: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def local(self, key: str, value: Any) -> Any:
        """Returns this segment's share of a whole state entry: [numel] for a tensor of the parameter's shape."""
        if not is_per_element(key, value) or value.shape != self.parameter.shape:
            return value
        if is_distributed(self.parameter) and not is_distributed(value):
            own = cut_of(self.parameter).of(value)
        elif part_of(value) == part_of(self.parameter):
            own = local_of(value)
        else:
            raise ValueError(
                f"[zeropg] optimizer state {key!r} of {self.name!r} is a DTensor ({placements_text(value)}) that is "
                f"cut otherwise than the parameter ({placements_text(self.parameter)}); expected the same placements, "
                "or a whole plain tensor: pass its full_tensor()."
            )
        return own.detach().reshape(-1)[self.offset : self.offset + self.numel]


def segments_of(flat: FlatGroup) -> list[Segment]:
    offsets = {id(parameter): offset for _, parameter, offset, _ in flat.slots}
    return [
        Segment(parameter, name, start, stop, flat.master_start + start - offsets[id(parameter)])
        for parameter, name, start, stop in flat.segments
    ]


def held_segments(flat: FlatGroup, held: Set[int]) -> tuple[list[Segment], list[int]]:
    """Returns the segments of the parameters whose ids are in `held`, and the number of the stretch that each is in.

    A stretch is held from its first to its last segment, with the padding between them.
    """
    segments: list[Segment] = []
    stretches: list[int] = []
    is_inside, count = False, 0
    for segment in segments_of(flat):
        was_inside, is_inside = is_inside, id(segment.parameter) in held
        if is_inside:
            count += not was_inside
            segments.append(segment)
            stretches.append(count - 1)
    return segments, stretches


def in_memory(flat: FlatGroup) -> torch.Tensor:
    """Returns the masters of a flat group that has them in memory."""
    master = flat.master
    assert master is not None, "only OffloadedUpdater takes masters in a tier"
    return master.detach()


def owned_by(flat: FlatGroup, segments: Sequence[Segment]) -> dict[str, tuple[int, int]]:
    names = {segment.name for segment in segments}
    return {name: (start, stop) for name, _, start, stop in flat.local_shards if name in names}
