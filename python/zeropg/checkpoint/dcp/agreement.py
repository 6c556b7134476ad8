"""Whether all ranks have read the same tensors: DCP plans a load on each rank alone."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
import torch.distributed as dist

from zeropg.checkpoint.match import listed
from zeropg.rank_io.agreement import collective_device, peers_needed


def check_read_alike(
    group: dist.ProcessGroup, operation: str, names: Sequence[str], wanted: Set[int], read: Set[int]
) -> None:
    """Raises ValueError, on every rank, where a tensor was read on one rank and not on another. Collective.

    Such a checkpoint has holes, as one that was saved with use_collectives=False.

    names: of all tensors, the same on every rank. wanted: those, by index, of which this rank has a part to load; read:
    those of them that it has read.
    """
    counts = torch.zeros(len(names), 2, dtype=torch.int32)
    counts[list(read), 0] = 1
    counts[list(wanted - read), 1] = 1
    counts = counts.to(collective_device(group))
    with peers_needed(group, operation):
        dist.all_reduce(counts, group=group)
    was_read, was_missed = counts.bool().cpu().unbind(1)
    context = f"[zeropg rank {group.rank()}/{group.size()}] {operation}:"
    if was_missed.any() and not was_read.any():
        raise ValueError(
            f"{context} nothing was read: the checkpoint has nothing of this, or the dictionary was not given to "
            "dcp.load, which calls load_state_dict itself for what stands at its top; leave out what was not saved"
        )
    if torn := [names[index] for index in (was_read & was_missed).nonzero().flatten().tolist()]:
        raise ValueError(
            f"{context} the checkpoint holds only a part of {listed([repr(name) for name in torn])}; expected "
            "every element. What was saved with use_collectives=False does not load into a sharded model"
        )
