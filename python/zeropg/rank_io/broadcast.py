"""The values of one rank on all."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_values(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gives a dense tensor of any dtype, and no overlap, the values of the group's rank 0, in place. Collective."""
    room = values.contiguous()
    dist.broadcast(room.view(-1).view(torch.uint8), group_src=0, group=group)  # not every backend knows every dtype
    if room is not values:
        values.copy_(room)
