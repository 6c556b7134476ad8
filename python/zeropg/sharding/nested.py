"""The tensors in what modules take and return: nested containers, registered pytrees, and objects of users' classes."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

# What holds no tensors, or none that a forward passes on.
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Size,
    nn.Module,
)
# An object may lead to a whole dataset; nobody waits for that in every forward.
_MOST_VISITED = 2000


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replaces the tensors in nested tuples, lists, dicts (also Hugging Face's outputs), dataclasses and pytrees.

    Other objects stay as they are: a copy of them could miss what a module writes to them. See hidden_tensors_in.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    if type(value) in _pytree.SUPPORTED_NODES and not isinstance(value, tuple | list | dict):
        node = _pytree.SUPPORTED_NODES[type(value)]
        children, context = node.flatten_fn(value)
        items = [map_tensors(item, function) for item in children]
        return value if _same(items, children) else node.unflatten_fn(items, context)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        if _same(items, value):
            return value
        if hasattr(value, "_make"):
            return value._make(items)  # a named tuple
        return type(value)(items) if hasattr(value, "n_sequence_fields") else tuple(items)
    if isinstance(value, list):
        items = [map_tensors(item, function) for item in value]
        if _same(items, value):
            return value
        value = copy.copy(value)  # keeps the class
        value[:] = items
        return value
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, function)) is not old}
        if changed:
            value = copy.copy(value)
            for key, new in changed.items():
                value[key] = new
        return value
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {key: new for key, old in fields.items() if (new := map_tensors(old, function)) is not old}
        if changed:
            value = copy.copy(value)
            for key, new in changed.items():
                object.__setattr__(value, key, new)  # also where the class is frozen
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that map_tensors would replace, in its order."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, note)
    return tensors


def hidden_tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that map_tensors does not reach: attributes of other objects and members of sets, where the first
    couple of thousand objects lead to them.
    """
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(value: Any, is_hidden: bool) -> None:
        if isinstance(value, torch.Tensor):
            if is_hidden:
                tensors.append(value)
            return
        if isinstance(value, _ATOMS) or id(value) in seen or len(seen) == _MOST_VISITED:
            return
        seen.add(id(value))
        children, hides = _children(value)
        for child in children:
            walk(child, is_hidden or hides)

    walk(value, False)
    return tensors


def _children(value: Any) -> tuple[Iterable[Any], bool]:
    """What is in `value`, and whether map_tensors leaves it there."""
    if isinstance(value, tuple | list):
        return list(value), False
    if isinstance(value, dict):
        return list(value.values()), False
    if type(value) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0], False
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)], False
    if isinstance(value, set | frozenset):
        return list(value), True
    slots = [name for cls in type(value).__mro__ for name in _names_of(getattr(cls, "__slots__", ()))]
    attributes = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*attributes, *getattr(value, "__dict__", {}).values()], True


def _names_of(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
