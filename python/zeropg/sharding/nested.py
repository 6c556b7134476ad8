"""The tensors in what modules take and return: nested containers, registered pytrees, and objects of users' classes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
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


class Replacement:
    """Other tensors in place of some in nested arguments, as long as a unit runs with them.

    Lists, dicts (also Hugging Face's outputs) and dataclasses get them in place, since what a module writes to such an
    object must reach whoever else holds it; tuples, which nobody writes to, are made anew. A tensor that is found twice
    gets one replacement.
    """

    def __init__(self, value: Any, replacements: Mapping[int, torch.Tensor]) -> None:
        """`replacements`: by id of the tensor, which the caller keeps alive."""
        self._new = replacements
        self._originals: dict[int, torch.Tensor] = {}  # by id of the replacement
        self._done: dict[int, Any] = {}
        self._changed: list[Any] = []
        self.value = self._put(value)

    def undo(self) -> None:
        """Puts the tensors back that are still where they were replaced."""
        for container in self._changed:
            for key, item in _items_of(container):
                if isinstance(item, torch.Tensor) and id(item) in self._originals:
                    _set_item(container, key, self._originals[id(item)])
                elif type(item) is tuple or hasattr(item, "_fields"):
                    _set_item(container, key, self._restored(item))

    def _put(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            new = self._new.get(id(value), value)
            if new is not value:
                self._originals[id(new)] = value
            return new
        if not _is_walked(value):
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        self._done[id(value)] = value  # for a container that holds itself
        if isinstance(value, tuple):
            self._done[id(value)] = _rebuilt(value, [self._put(item) for item in value])
            return self._done[id(value)]
        is_changed = False
        for key, item in _items_of(value):
            new = self._put(item)
            if new is not item:
                _set_item(value, key, new)
                is_changed = True
        if is_changed:
            self._changed.append(value)
        return value

    def _restored(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._originals.get(id(value), value)
        if isinstance(value, tuple) and _is_walked(value):
            return _rebuilt(value, [self._restored(item) for item in value])
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a Replacement reaches, each once."""
    tensors: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif _is_walked(value) and id(value) not in seen:
            seen.add(id(value))
            for _, item in _items_of(value):
                walk(item)

    walk(value)
    return list(tensors.values())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether an alias made by the core can stand for it: no subclass, and nothing that users have hung on it."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not vars(tensor)


def _is_walked(value: Any) -> bool:
    if isinstance(value, _ATOMS):
        return False
    if isinstance(value, tuple):  # other subclasses may have constructors of any kind
        return type(value) is tuple or hasattr(value, "_make") or hasattr(value, "n_sequence_fields")
    return isinstance(value, list | dict) or dataclasses.is_dataclass(value)


def _items_of(value: Any) -> list[tuple[Any, Any]]:
    """(key, item) of what _is_walked, in order."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    names = (field.name for field in dataclasses.fields(value))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _set_item(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, list | dict):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also where the dataclass is frozen


def _rebuilt(value: tuple[Any, ...], items: list[Any]) -> Any:
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_make"):
        return value._make(items)  # a named tuple
    return type(value)(items)


def hidden_tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a Replacement does not reach: in pytrees of users' classes, attributes of other objects and
    members of sets, where the first couple of thousand objects lead to them.
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
    """What is in `value`, and whether a Replacement leaves it there."""
    if _is_walked(value):
        return [item for _, item in _items_of(value)], False
    if isinstance(value, tuple):
        return [*value, *getattr(value, "__dict__", {}).values()], True
    if type(value) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0], True
    if isinstance(value, set | frozenset):
        return list(value), True
    slots = [name for cls in type(value).__mro__ for name in _names_of(getattr(cls, "__slots__", ()))]
    attributes = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*attributes, *getattr(value, "__dict__", {}).values()], True


def _names_of(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
