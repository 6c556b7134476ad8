"""What Python keeps about a sharded model beside the C++ core: its modules, its hooks and who may have changed it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import stateless

from zeropg._native import _C
from zeropg.sharding.nested import hidden_tensors_in, map_tensors, tensors_in
from zeropg.sharding.running_statistics import modules_with_statistics
from zeropg.sharding.units import UnitPlan


class PendingSave(Protocol):
    """A checkpoint that is being written in the background."""

    def wait(self, timeout: float | None = None) -> None: ...


@dataclass
class ShardedState:
    """One per sharded model, on the root as `_zeropg_state`; `_zeropg` is its core."""

    model: nn.Module
    core: _C.ShardedModule
    plans: list[UnitPlan]
    param_dtype: torch.dtype | None
    # Every module as it was: its dictionaries, which users write to, and copies of them.
    contents: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    with_statistics: list[nn.Module] = field(default_factory=list)  # batch norms
    has_said_full_gradients: bool = False
    pending_save: PendingSave | None = None  # the last save_checkpoint(async_save=True)
    full_gradients_depth: int = 0  # of `with zeropg.full_gradients`
    is_writing_shards: bool = False  # inside `with zeropg.writable_shards`
    _is_functional: bool = False

    def __post_init__(self) -> None:
        self.with_statistics = modules_with_statistics(self.model)
        for name, module in self.model.named_modules():
            self.contents.append((name, module, dict(module._parameters), dict(module._modules)))
        for index, plan in enumerate(self.plans):
            vars(plan.module)["_zeropg_unit"] = (self, index)

    def run(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a unit with its parameters whole: around its hooks, and around what torch.compile made of it."""
        is_root = index == len(self.plans) - 1
        if self._is_functional or (is_root and self._replaces_everything()):
            return self._run_functional(call, args, kwargs)
        if is_root and self.param_dtype is not None:
            args, kwargs = map_tensors((args, kwargs), self._to_param_dtype)
        args, kwargs = self._before(index, args, kwargs)
        try:
            output = call(*args, **kwargs)
        except BaseException:
            self.core.abandon_forward(index)
            raise
        outputs = [*tensors_in(output), *hidden_tensors_in(output)] if torch.is_grad_enabled() else []
        self.core.post_forward(index, outputs)
        return output

    def _before(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.core.stage < 3 or not torch.is_grad_enabled():
            self.core.pre_forward(index, [], False)
            return args, kwargs
        tensors = tensors_in((args, kwargs))
        has_hidden = any(tensor.requires_grad for tensor in hidden_tensors_in((args, kwargs)))
        if not any(tensor.requires_grad for tensor in tensors):
            self.core.pre_forward(index, [], has_hidden)
            return args, kwargs
        aliases = iter(self.core.pre_forward(index, tensors, has_hidden))
        return map_tensors((args, kwargs), lambda tensor: next(aliases))

    def _run_functional(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside torch.func.functional_call with tensors for all parameters: ours are not used."""
        before, self._is_functional = self._is_functional, True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_functional = before

    def check_outside_full_gradients(self, operation: str) -> None:
        """Raises RuntimeError where `.grad` shows copies, whose values would replace what `operation` does."""
        if self.full_gradients_depth > 0 and self.core.stage >= 2:
            raise RuntimeError(
                f"{self._context(operation)} called inside full_gradients, where `.grad` is a copy of the sharded "
                "gradient that replaces it when the `with` ends; call it after."
            )

    def check_outside_writable_shards(self, operation: str) -> None:
        """Raises RuntimeError where the user writes masters, or copies of them that replace them later."""
        if self.is_writing_shards:
            raise RuntimeError(f"{self._context(operation)} called inside zeropg.writable_shards; call it after.")

    def _context(self, operation: str) -> str:
        return f"[zeropg rank {self.core.rank}/{self.core.world_size}] {operation}:"

    def _replaces_everything(self) -> bool:
        """Whether functional_call has put other tensors in place of all parameters; for some, those are used.

        Raises RuntimeError where parameters were changed by anything else.
        """
        replaced = self._replaced()
        if replaced and _is_in_functional_call():
            return {name for name, _ in self.model.named_parameters()} <= set(replaced)
        if changed := replaced or self.core.changed_parameters():
            raise RuntimeError(
                f"[zeropg rank {self.core.rank}/{self.core.world_size}] forward: {', '.join(map(repr, changed))} "
                "changed after fully_shard (replaced, added, moved, cast or resized); expected the parameters that "
                "were sharded. Make such changes before fully_shard; to set values use "
                "`with zeropg.full_parameters(model, writable=True):` or zeropg.load_full_state_dict."
            )
        return False

    def _to_param_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    def _replaced(self) -> list[str]:
        names: list[str] = []
        for prefix, module, parameters, children in self.contents:
            for before, after in ((parameters, module._parameters), (children, module._modules)):
                if before.keys() == after.keys() and all(after[key] is value for key, value in before.items()):
                    continue
                for key in {**before, **after}:
                    old, new = before.get(key), after.get(key)
                    if old is not new:
                        names += _parameter_names(".".join(filter(None, (prefix, key))), new if old is None else old)
        return names

    def ignored_parameters(self) -> Iterator[nn.Parameter]:
        known = {id(parameter) for plan in self.plans for _, parameter in plan.parameters}
        return (parameter for parameter in self.model.parameters() if id(parameter) not in known)


def _is_in_functional_call() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _parameter_names(name: str, value: nn.Module | torch.Tensor | None) -> list[str]:
    if isinstance(value, nn.Module):
        return [f"{name}.{key}" for key, _ in value.named_parameters(remove_duplicate=False)]
    return [name]


def state_of(model: nn.Module, operation: str) -> ShardedState:
    """Returns the state of a sharded model. Raises ValueError naming `operation` where the model is not one's root."""
    state = getattr(model, "_zeropg_state", None)
    if isinstance(state, ShardedState):
        return state
    if not isinstance(model, nn.Module):
        raise TypeError(f"[zeropg] {operation}: expected a module, got {type(model).__name__}.")
    hint = (
        "it is a unit of a larger sharded model: pass that model"
        if getattr(model, "_zeropg_is_unit", False)
        else "call zeropg.fully_shard(model) first"
    )
    raise ValueError(f"[zeropg] {operation}: this {type(model).__name__} is not a sharded model; {hint}.")
