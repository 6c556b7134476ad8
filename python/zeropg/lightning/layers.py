"""`compute_layers_in`: layers that a step of Lightning's calls by themselves, in the dtype of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zeropg.sharding.nested import Replacement, tensors_in
from zeropg.sharding.state import names_label


def compute_layers_in(dtype: torch.dtype, model: nn.Module) -> None:
    """Lets the outermost layers of a sharded model, by hooks, compute in the dtype of their parameters.

    A step runs under autocast, so that its losses are taken in fp32, and hands its batch over as it is. In these layers
    autocast is off, and floating inputs other than labels are cast. What has no parameters of that dtype, a loss say,
    stays as it is.
    """
    for layer in _outermost(model):
        if any(parameter.dtype == dtype for parameter in layer.parameters()):
            _Layer(layer, dtype)


class _Layer:
    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._running: list[ExitStack] = []  # one for each call, which may be inside another
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = {key: value for key, value in kwargs.items() if names_label(key)}
        inputs = (args, {key: value for key, value in kwargs.items() if key not in labels})
        tensors = tensors_in(inputs)
        old = [one for one in tensors if one.is_floating_point() and one.dtype != self._dtype]
        replaced = Replacement(inputs, {id(one): one.to(self._dtype) for one in old})
        running = ExitStack()
        running.callback(replaced.undo)
        device = next(module.parameters()).device
        running.enter_context(torch.autocast(device.type, enabled=False))
        self._running.append(running)
        args, kwargs = replaced.value
        return args, {**kwargs, **labels}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop().close()


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """What a step calls first: children, and those of containers."""
    for child in model.children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _outermost(child)
