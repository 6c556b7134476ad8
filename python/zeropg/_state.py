"""What Python keeps about a sharded model beside the C++ core: its modules, its hooks and who may have changed it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeropg._native import _C
from zeropg._units import UnitPlan

if TYPE_CHECKING:
    from zeropg.checkpoint import PendingCheckpoint


@dataclass
class ShardedState:
    """One per sharded model, on the root as `_zeropg_state`; `_zeropg` is its core."""

    model: nn.Module
    core: _C.ShardedModule
    plans: list[UnitPlan]
    param_dtype: torch.dtype | None
    handles: list[RemovableHandle] = field(default_factory=list)
    # Every module as it was: its dictionaries, which users write to, and copies of them.
    contents: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    has_said_full_gradients: bool = False
    pending_save: PendingCheckpoint | None = None  # the last save_checkpoint(async_save=True)

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            self.contents.append((name, module, dict(module._parameters), dict(module._modules)))
        for index, plan in enumerate(self.plans):
            self._install(index, plan.module, is_root=plan is self.plans[-1])

    def _install(self, index: int, module: nn.Module, *, is_root: bool) -> None:
        core = self.core
        shards_parameters = core.stage == 3

        def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_root:
                self.check_unchanged()
                if self.param_dtype is not None:
                    args, kwargs = _map_tensors((args, kwargs), self._to_param_dtype)
            if not shards_parameters or not torch.is_grad_enabled():
                core.pre_forward(index, [])
                return args, kwargs
            tensors = _tensors_in((args, kwargs))
            if not any(tensor.requires_grad for tensor in tensors):
                core.pre_forward(index, [])
                return args, kwargs
            aliases = iter(core.pre_forward(index, tensors))
            return _map_tensors((args, kwargs), lambda tensor: next(aliases))

        def post_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            core.post_forward(index, _tensors_in(output) if torch.is_grad_enabled() else [])

        self.handles.append(module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True))
        self.handles.append(module.register_forward_hook(post_forward, with_kwargs=True))

    def _to_param_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    def check_unchanged(self) -> None:
        """Raises RuntimeError naming parameters that were replaced, added, moved or (un)frozen since fully_shard."""
        changed = self._replaced() or self.core.changed_parameters()
        if changed:
            raise RuntimeError(
                f"[zeropg rank {self.core.rank}/{self.core.world_size}] forward: {', '.join(map(repr, changed))} "
                "changed after fully_shard (replaced, added, moved, cast, resized, or requires_grad flipped); expected "
                "the parameters that were sharded. Make such changes before fully_shard; to set values use "
                "`with zeropg.full_parameters(model, writable=True):` or zeropg.load_full_state_dict."
            )

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

    def remove(self) -> None:
        """Takes the hooks off; the core is given up by whoever calls."""
        for handle in self.handles:
            handle.remove()


def _parameter_names(name: str, value: nn.Module | torch.Tensor | None) -> list[str]:
    if isinstance(value, nn.Module):
        return [f"{name}.{key}" for key, _ in value.named_parameters(remove_duplicate=False)]
    return [name]


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replaces the tensors in nested tuples, lists, dicts (also Hugging Face's outputs) and dataclasses."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [_map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        items = [_map_tensors(item, function) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := _map_tensors(old, function)) is not old}
        if changed:
            value = copy.copy(value)  # keeps the class
            for key, new in changed.items():
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {key: new for key, old in fields.items() if (new := _map_tensors(old, function)) is not old}
        if changed:
            value = copy.copy(value)
            for key, new in changed.items():
                object.__setattr__(value, key, new)  # also where the class is frozen
    return value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _map_tensors(value, note)
    return tensors


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
