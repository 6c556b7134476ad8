"""Forwards inside torch.func's transforms (vmap, jvp, grad), forward-mode differentiation and torch.jit.trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

_KEYS = DispatchKeySet(DispatchKey.FuncTorchDynamicLayerFrontMode).add(DispatchKey.FuncTorchDynamicLayerBackMode)


def is_transformed() -> bool:
    """Whether a transform of torch.func or torch.jit.trace looks on."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Nobody looks on inside: tensors that are made there belong to no transform, since what waits for other ranks
    keeps them for longer, and no trace has the communication."""
    if not is_transformed():
        yield
        return
    trace = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            yield
    finally:
        torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]


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
