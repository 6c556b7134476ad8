"""What the core gets of a parameter when it takes it over."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from zeropg.tensor_parallel.distributed import follow_dtype, functions_of, is_distributed, local_of
from zeropg.tensor_parallel.groups import TensorParallel

# A parameter; its local part and what the core asks torch for, where it is distributed.
Taken = tuple[nn.Parameter, tuple[torch.Tensor, Callable[..., torch.Tensor], Callable[..., torch.Tensor]] | None]


def taken(parameter: nn.Parameter, parallel: TensorParallel, param_dtype: torch.dtype | None) -> Taken:
    """Collective over the ranks that have the other parts: all compute with one value of a parameter that is whole."""
    if not is_distributed(parameter):
        for group in parallel.dimensions:
            _broadcast(parameter.detach(), group)
        return parameter, None
    dtype = param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype
    follow_dtype(parameter, dtype)
    local_gradient, over = functions_of(parameter)
    return parameter, (local_of(parameter), local_gradient, over)


def _broadcast(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    room = values.contiguous()
    dist.broadcast(room.view(-1).view(torch.uint8), group_src=0, group=group)  # not every backend knows every dtype
    if room is not values:
        values.copy_(room)
