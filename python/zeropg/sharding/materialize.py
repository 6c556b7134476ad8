"""Memory and values for what a model has on the `meta` device, one module after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from zeropg.sharding.units import UnitPlan

# Its name, itself, and the innermost module around it that has `_init_weights`, as Hugging Face's models do.
_Place = tuple[str, nn.Module, nn.Module | None]


class _Pending(NamedTuple):
    name: str
    module: nn.Module
    initializers: list[tuple[str, Callable[[], Any]]]  # with their names; the next one where the last left something


class Materializer:
    """Gives memory to parameters and buffers that are on `meta`, and their modules' own initial values.

    Children come before their parents, as where a model is built on a real device, so that one seed gives the same
    values. What of a module is not on `meta`, loaded or tied, keeps its values. Parameters keep their identity
    (`torch.utils.swap_tensors`), so an optimizer made before still holds them.

    Raises ValueError for a module on `meta` that nothing gives values to.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._done = 0  # modules
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: on meta, which is kept, and here
        self._pending = deque(
            _Pending(name, module, _initializers_of(name, module, owner))
            for name, module, owner in _children_first(model)
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

    @property
    def is_done(self) -> bool:
        """Whether nothing is left that needs values."""
        return not self._pending

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
        name, module, initializers = self._pending.popleft()
        own = [(key, tensor) for key, tensor in _own_tensors(module) if tensor.is_meta]
        if not own:  # shared with a module before it
            return
        there = [(tensor, tensor.detach().clone()) for _, tensor in _own_tensors(module) if not tensor.is_meta]
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # swap_tensors refuses a tensor with weak references
        for key, tensor in own:
            self._give_memory(module, key, tensor)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        left = _without_values(module, [key for key, _ in own])
        for what, initialize in initializers:
            if left():
                self._initialize(name, module, what, initialize)
        with torch.no_grad():
            for tensor, value in there:
                tensor.copy_(value)
        if left():
            raise ValueError(
                f"[zeropg] fully_shard: {_full_name(name, left()[0])} was on the meta device, and "
                f"{type(module).__name__}.{initializers[-1][0]}() leaves it without values; set it there, or build the "
                "model on a real device."
            )

    def _give_memory(self, module: nn.Module, key: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._buffers:
            # Not a number, so that what nobody initialises is noticed.
            fresh = torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0, device=self._device)
            if isinstance(tensor, nn.Parameter):
                _become(tensor, nn.Parameter(fresh, requires_grad=tensor.requires_grad))
                return
            self._buffers[id(tensor)] = (tensor, fresh)
        module._buffers[key] = self._buffers[id(tensor)][1]

    def _initialize(self, name: str, module: nn.Module, what: str, initialize: Callable[[], Any]) -> None:
        try:
            initialize()
        except Exception as error:
            raise RuntimeError(
                f"[zeropg] fully_shard: {type(module).__name__}.{what}() of {name or 'the model'!r} raised "
                f"{type(error).__name__}: {error}; the model is sharded in part now: build it again. A module may set "
                "its own parameters there, and those of children that are no units."
            ) from error


def _become(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Gives a parameter the memory of another one; hooks and attributes stay its own."""
    attributes = dict(vars(parameter))
    torch.utils.swap_tensors(parameter, other)
    vars(parameter).update(attributes)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(parameter, name)) is not None:  # autograd hears of them when they are set
            setattr(parameter, name, None)
            setattr(parameter, name, hooks)


def _children_first(model: nn.Module) -> Iterator[_Place]:
    seen: set[int] = set()

    def walk(name: str, module: nn.Module, owner: nn.Module | None) -> Iterator[_Place]:
        if id(module) in seen:
            return
        seen.add(id(module))
        owner = module if callable(getattr(module, "_init_weights", None)) else owner
        for key, child in module.named_children():
            yield from walk(f"{name}.{key}" if name else key, child, owner)
        yield name, module, owner

    return walk("", model, None)


def _initializers_of(name: str, module: nn.Module, owner: nn.Module | None) -> list[tuple[str, Callable[[], Any]]]:
    found: list[tuple[str, Callable[[], Any]]] = []
    if owner is not None:
        initialize = cast("Callable[[nn.Module], Any]", owner._init_weights)
        found.append(("_init_weights", lambda: initialize(module)))
    if (reset := getattr(module, "reset_parameters", None)) is not None:
        found.append(("reset_parameters", cast("Callable[[], Any]", reset)))
    if not found:
        meta = ", ".join(_full_name(name, key) for key, tensor in _own_tensors(module) if tensor.is_meta)
        raise ValueError(
            f"[zeropg] fully_shard: {meta} are on the meta device and {type(module).__name__} has no "
            "reset_parameters() to give them values; add it, or build the model on a real device."
        )
    return found


def _without_values(module: nn.Module, keys: Sequence[str]) -> Callable[[], list[str]]:
    """Returns what names those of a module's fresh tensors that nobody has given values to."""
    fresh = {key: tensor for key, tensor in _own_tensors(module) if key in keys}
    versions = {key: tensor._version for key, tensor in fresh.items()}

    def find() -> list[str]:
        now = dict(_own_tensors(module))
        return [
            key
            for key, tensor in fresh.items()
            if (
                now[key].isnan().any()
                if now[key].is_floating_point()
                else now[key] is tensor and tensor._version == versions[key] and tensor.numel() > 0
            )
        ]

    return find


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _full_name(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
