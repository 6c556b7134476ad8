"""Memory and values for what a model has on the `meta` device, one module after the other."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from zeropg.sharding.units import UnitPlan


class _Pending(NamedTuple):
    name: str
    module: nn.Module
    initialize: Callable[[], None]


class Materializer:
    """Gives memory to parameters and buffers that are on `meta`, and their modules' own initial values.

    Modules come in named_modules() order, as where a model is built on a real device, so that one seed gives the same
    values. Parameters keep their identity (`torch.utils.swap_tensors`), so an optimizer made before still holds them.

    Raises ValueError for a module on `meta` that nothing gives values to.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._done = 0  # modules
        self._pending = deque(
            _Pending(name, module, _initializer_of(model, name, module))
            for name, module in model.named_modules()
            if any(tensor.is_meta for _, tensor in _own_tensors(module))
        )

    def order(self, units: Sequence[UnitPlan]) -> list[int]:
        """Indices of the units as their parameters get values, the first ones first."""
        position = {
            id(parameter): index  # of the last module that has it
            for index, pending in enumerate(self._pending)
            for parameter in pending.module.parameters(recurse=False)
        }
        self._last_of = [max((position.get(id(p), -1) for _, p in unit.parameters), default=-1) for unit in units]
        return sorted(range(len(units)), key=lambda index: (self._last_of[index], index))

    def complete(self, unit: int) -> None:
        """Gives values to the parameters of a unit of `order`, and of all modules up to its last."""
        while self._done <= self._last_of[unit]:
            self._materialize_next()

    def finish(self) -> None:
        """Gives values to what is left."""
        while self._pending:
            self._materialize_next()

    def _materialize_next(self) -> None:
        self._done += 1
        name, module, initialize = self._pending.popleft()
        own = [(key, tensor) for key, tensor in _own_tensors(module) if tensor.is_meta]
        if not own:  # shared with a module before it
            return
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # swap_tensors refuses a tensor with weak references
        for key, tensor in own:
            # Not a number, so that what nobody initialises is noticed below.
            fresh = torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0, device=self._device)
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(fresh, requires_grad=tensor.requires_grad))
            else:
                module._buffers[key] = fresh
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        initialize()
        for key, tensor in _own_tensors(module):
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(
                    f"[zeropg] fully_shard: {f'{name}.{key}' if name else key} was on the meta device, and "
                    f"{type(module).__name__}.{_name_of(initialize)}() leaves it without values; set it there, or "
                    "build the model on a real device."
                )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _initializer_of(model: nn.Module, name: str, module: nn.Module) -> Callable[[], None]:
    if (reset := getattr(module, "reset_parameters", None)) is not None:
        return cast("Callable[[], None]", reset)
    if hasattr(model, "_init_weights"):  # Hugging Face models
        return functools.partial(cast("Callable[[nn.Module], None]", model._init_weights), module)
    meta = ", ".join(f"{name}.{key}" if name else key for key, tensor in _own_tensors(module) if tensor.is_meta)
    raise ValueError(
        f"[zeropg] fully_shard: {meta} are on the meta device and {type(module).__name__} has no reset_parameters() to "
        "give them values; add it, or build the model on a real device."
    )


def _name_of(initialize: Callable[[], None]) -> str:
    return getattr(initialize, "func", initialize).__name__
