"""The entries of an optimizer's state: which have a value for each element, and how they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from zeropg._native import _C
from zeropg.optim.kernels import Kernels
from zeropg.optim.packed_state import elements_of, entry_range, pieces_of

State = defaultdict[torch.Tensor, Any]

# State of torch's optimizers that is one number per parameter, whatever the parameter's shape.
_SCALARS = frozenset({"step", "mu", "eta", "mu_product"})

# State of layer-wise optimizers that is a tensor of another shape than the parameter's, by key: every rank that has a
# part of the parameter keeps it whole, the same on all.
FACTORS = frozenset({"row_var", "col_var"})


def is_per_element(key: str, value: Any) -> bool:
    """Whether a state entry has a value for each element, rather than one number, or a factor, for the parameter."""
    return isinstance(value, torch.Tensor) and key not in _SCALARS and key not in FACTORS


class FirstState(NamedTuple):
    """What a first step leaves in a parameter's state, by key; what has a value for each element as a tensor of one."""

    entries: dict[str, Any]
    begins_with_zeros: bool  # whether zeros, and a `step` of 0, stand for no state


def views(entries: Mapping[str, Any], start: int, stop: int | None) -> Iterator[tuple[str, int, torch.Tensor]]:
    for key, value in entries.items():
        if is_per_element(key, value):
            yield key, start, value.reshape(-1)[start:stop]


def elements(
    kernels: Kernels | None, entries: Mapping[str, Any], start: int, stop: int
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """As `_views`, also of packed state: bfloat16, in pieces."""
    packed = {} if kernels is None else kernels.packed_slots
    for key, _, values in views(entries, 0, None):
        if key in packed and values.dtype == torch.uint8:
            for begin, end in pieces_of(start, stop):
                yield key, begin, unpacked(packed[key], values, begin, end)
        else:
            yield key, start, values[start:stop]


def unpacked(slot: _C.StateSlot, entries: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a parameter whose packed state is `entries`."""
    first, last = entry_range(slot, start, stop)
    return elements_of(slot, entries[first:last], start, stop)


def copied(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}
