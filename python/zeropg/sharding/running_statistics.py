"""Running statistics of batch norms. Every rank's forwards update its own; at each step rank 0's win, as in DDP."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from zeropg.rank_io.agreement import collective_device

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def modules_with_statistics(model: nn.Module) -> list[nn.Module]:
    """Those whose statistics each rank updates from its own batches; SyncBatchNorm's are the same everywhere."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and not isinstance(m, nn.SyncBatchNorm)]


def refuse_mixed_statistics(model: nn.Module, sharded: Collection[int], param_dtype: torch.dtype) -> None:
    """Lets the forward of a batch norm or spectral norm raise ValueError where its buffers do not have param_dtype.

    Not before: a model that is only loaded and exported may keep them so. sharded: the identities of the parameters
    that compute in param_dtype.
    """
    for name, module in model.named_modules():
        for buffer, parameter in _statistics_of(model, name, module):
            kept = module._buffers.get(buffer)
            if kept is not None and kept.dtype != param_dtype and id(parameter) in sharded:
                check = partial(_check_statistics, name, buffer, param_dtype)
                module.register_forward_pre_hook(check, prepend=True)  # spectral_norm may be such a hook


def _statistics_of(model: nn.Module, name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the buffers that torch computes with together with a parameter, and that parameter."""
    if isinstance(module, _BatchNorm):
        yield "running_mean", module._parameters.get("weight")
    elif isinstance(module, _SpectralNorm):  # of `original` beside it, in a ParametrizationList
        yield "_u", model.get_submodule(name.rpartition(".")[0])._parameters.get("original")
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield f"{hook.name}_u", module._parameters.get(f"{hook.name}_orig")


def _check_statistics(name: str, buffer: str, computed: torch.dtype, norm: nn.Module, _: object) -> None:
    kept = norm._buffers.get(buffer)
    if kept is not None and kept.dtype != computed:
        raise ValueError(
            f"[zeropg] forward: the {type(norm).__name__} {name!r} computes in {computed} and keeps {buffer} in "
            f"{kept.dtype}, which torch cannot mix; expected one dtype: shard with buffer_dtype={computed}, which "
            "rounds all floating buffers to it, train in fp32, or use a norm without running statistics."
        )


def cast_statistics(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Rounds the statistics of batch norms to the dtype that they will compute in, as model.to(dtype) would.

    dtype: None changes nothing.
    """
    for module in model.modules() if dtype is not None else ():
        if isinstance(module, _NormBase) and module._parameters.get("weight") is not None:
            for name in ("running_mean", "running_var"):
                if (buffer := module._buffers.get(name)) is not None:
                    module._buffers[name] = buffer.to(dtype)


def broadcast_running_statistics(modules: list[nn.Module], group: dist.ProcessGroup) -> None:
    """Gives all ranks the statistics of rank 0, in one broadcast. All ranks must call; without any nothing is sent."""
    buffers = [buffer for module in modules for name in _NAMES if (buffer := module._buffers.get(name)) is not None]
    if group.size() == 1 or not buffers:
        return
    device = collective_device(group)
    # As bytes: the dtypes differ.
    flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8).to(device) for buffer in buffers])
    dist.broadcast(flat, group=group, group_src=0)
    if group.rank() == 0:
        return
    pieces = flat.split([buffer.nbytes for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        # A copy, since a piece may begin where its dtype must not.
        buffer.detach().copy_(piece.clone().view(buffer.dtype).view(buffer.shape))


@contextmanager
def unchanged_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives the modules' statistics back the values that they have now: a batch that is seen again counts once."""
    norms = [part for module in modules for part in module.modules() if isinstance(part, _NormBase) and part.training]
    buffers = [buffer for norm in norms for name in _NAMES if (buffer := norm._buffers.get(name)) is not None]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
