"""What sets a model's masters, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeropg.checkpoint.plan import ModelPlan
from zeropg.checkpoint.values import put_whole
from zeropg.optim.update.segments import Segment, segments_of
from zeropg.rank_io.agreement import together
from zeropg.rank_io.progress import progress
from zeropg.sharding.access import check_replicas
from zeropg.sharding.state import ShardedState

Advance = Callable[[int], None]
# (index of the plan's tensor, start, stop) -> (first element, values) of elements [start, stop) of the flat part of it
# that this rank shards with others.
Pieces = Callable[[int, int, int], Iterator[tuple[int, torch.Tensor]]]
# (index of the plan's tensor, first element, room on the CPU) -> bytes that lie in the room now, one after the other.
# None, and nothing is read: the values have another dtype, or there are none.
IntoPlace = Callable[[int, int, torch.Tensor], Iterator[int] | None]


def load_masters(
    state: ShardedState,
    operation: str,
    own_bytes: int,
    read: Callable[[Advance], None],
    finish: Callable[[Advance, Exception | None], Any],
) -> None:
    """Runs `read` between the core's begin_step and end_load, with a bar on rank 0; then `finish`. Collective.

    finish: gets what `read` raised; what it raises itself is raised on every rank.
    """
    core, group = state.core, state.parallel.everybody
    with progress(operation, own_bytes, is_shown=group.rank() == 0) as advance:
        core.begin_step()
        failure: Exception | None = None
        try:
            read(advance)
        except Exception as error:
            failure = error
        finally:
            is_same = core.end_load(replaces_all=True)  # also after an error: the other ranks are waiting in theirs
        together(group, operation, lambda: finish(advance, failure))
        check_replicas(state, operation, is_same)


@torch.no_grad()
def set_values(
    state: ShardedState, plan: ModelPlan, pieces: Pieces, advance: Advance, into_place: IntoPlace | None = None
) -> None:
    """Sets this rank's masters, and parameters and buffers that nothing shards; what has no pieces stays.

    Inside `load_masters`, as its `read`. into_place: reads masters where they lie, which saves a copy.
    """
    groups: list[Any] = list(state.core.flat_groups)
    for group in groups:
        slot_of = {id(parameter): slot for slot, (_, parameter, _, _) in enumerate(group.slots)}
        for segment in segments_of(group):
            index = plan.index_of[segment.name]
            room = _room_of(group, segment)
            arrived = None if room is None or into_place is None else into_place(index, segment.offset, room)
            if arrived is not None:
                for bytes_now in arrived:
                    advance(bytes_now)
                if group.parameter_out is not None:
                    group.parameter_out[segment.start : segment.stop].copy_(room)
                continue
            for start, values in pieces(index, segment.offset, segment.offset + segment.numel):
                group.load(slot_of[id(segment.parameter)], values, start)
                advance(values.nbytes)
    for index, tensor in enumerate(plan.tensors):
        if not tensor.is_sharded:
            for start, values in pieces(index, 0, tensor.value.numel()):
                put_whole(tensor.value.detach(), start, values)
                advance(values.nbytes)


def _room_of(group: Any, segment: Segment) -> torch.Tensor | None:
    """The segment's masters themselves; None where a tier or a device has them."""
    master = group.master
    return None if master is None or master.device.type != "cpu" else master[segment.start : segment.stop]
