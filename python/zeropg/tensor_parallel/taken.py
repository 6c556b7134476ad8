"""What the core gets of a parameter when it takes it over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zeropg.rank_io.broadcast import broadcast_values
from zeropg.tensor_parallel.distributed import follow_dtype, functions_of, is_distributed, local_of
from zeropg.tensor_parallel.groups import TensorParallel

# A parameter; its local part and what the core asks torch for, where it is distributed.
Taken = tuple[nn.Parameter, tuple[torch.Tensor, Callable[..., torch.Tensor], Callable[..., torch.Tensor]] | None]


def taken(parameter: nn.Parameter, parallel: TensorParallel, param_dtype: torch.dtype | None) -> Taken:
    """Gives ranks that have the same part the first one's values. Collective over them."""
    local = local_of(parameter).detach()
    for group in parallel.with_same_part(parameter):
        broadcast_values(local, group)
    if not is_distributed(parameter):
        return parameter, None
    dtype = param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype
    follow_dtype(parameter, dtype)
    local_gradient, over = functions_of(parameter)
    return parameter, (local_of(parameter), local_gradient, over)


@contextmanager
def random_numbers_of_parts(parallel: TensorParallel, device: torch.device, *, is_needed: bool) -> Iterator[None]:
    """Inside, modules that initialise themselves draw other random numbers for each part of a tensor.

    On the CPU DTensor draws the same ones for all parts, so that the rows of a matrix would repeat. Afterwards ranks
    that were alike draw alike again.
    """
    if not is_needed or not parallel.dimensions or device.type != "cpu":
        yield
        return
    seed = int(torch.randint(1 << 62, ()))
    for group in parallel.dimensions:
        seed = (seed * group.size() + group.rank()) % (1 << 63)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        torch.manual_seed(seed)
        yield
