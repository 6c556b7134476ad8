"""Forwards inside torch.func's transforms (vmap, jvp, grad) and forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

_KEYS = DispatchKeySet(DispatchKey.FuncTorchDynamicLayerFrontMode).add(DispatchKey.FuncTorchDynamicLayerBackMode)


def is_transformed() -> bool:
    """Whether a transform of torch.func runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[None]:
    """Tensors that are made inside belong to no transform: what waits for other ranks keeps them for longer."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS) if is_transformed() else nullcontext()


def beneath(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields what a backward may reach of tensors without reaching them: their tangents in forward mode, and what
    stands behind those that transforms have wrapped, level by level."""
    wrapped = list(tensors)
    if forward_ad._current_level >= 0:
        tangents = [tangent for tensor in wrapped if (tangent := forward_ad.unpack_dual(tensor).tangent) is not None]
        yield from tangents
        wrapped += tangents
    for tensor in wrapped:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
            yield tensor
