"""Steps by the optimizer's own class: a copy of it without state and hooks, over what this rank updates."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeropg.optim.kernels import Group
from zeropg.optim.update.entries import FirstState, is_per_element


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The class's own step: torch wraps it with hooks and a profiler range, which the outer optimizer runs already."""
    step = type(optimizer).step
    wrapped: Callable[[torch.optim.Optimizer], Any] = getattr(step, "__wrapped__", step)
    return wrapped if getattr(step, "hooked", False) else step


def detached_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and attributes with its own, empty state and without hooks."""
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name in vars(copy):
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(copy, name, OrderedDict())
    copy.state = defaultdict(dict)
    copy.param_groups = []
    return copy


class OwnOptions:
    """The param groups of a class that may write to them (a count of its steps, a sum of weights)."""

    def __init__(self, groups: Sequence[Group], parameters: Sequence[Sequence[torch.Tensor]]):
        """groups: with the options of a step. parameters: what is stepped now, by group."""
        self._before = groups
        self.groups = [{**group, "params": list(own)} for group, own in zip(groups, parameters, strict=True)]

    def written(self) -> list[dict[str, Any]]:
        """What the step has put into each group; steps over other parts of the parameters begin as this one did."""
        return [
            {key: value for key, value in after.items() if key != "params" and value is not before.get(key, self)}
            for before, after in zip(self._before, self.groups, strict=True)
        ]


def first_state_of(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> FirstState:
    """Steps one element, of zero gradient, by the optimizer's own class; the optimizer stays as it is.

    parameter: whose number of dimensions, dtype and device count.
    """
    element = torch.nn.Parameter(torch.zeros([1] * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
    element.grad = torch.zeros_like(element)
    copy = detached_copy(optimizer)
    copy.param_groups = [{**group, "params": [element]}]
    with torch.no_grad():
        unhooked_step(optimizer)(copy)
    entries = {key: value for key, value in copy.state.get(element, {}).items() if value is not None}
    tensors = {key: value for key, value in entries.items() if is_per_element(key, value)}
    is_zero = all(not int(value.count_nonzero()) for value in tensors.values())
    only_counts = entries.keys() - tensors.keys() <= {"step"} and not group.get("dampening")
    return FirstState(entries, is_zero and only_counts)
