"""Optimizers, and lists of parameters, that were made before a model was split."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

# From a parameter that a model had before it was split, by its id, to what is in its place.
Replaced = dict[int, nn.Parameter]


def refuse_state(optimizer: Any, plan: Collection[str], model: nn.Module) -> None:
    """Raises ValueError for an optimizer that has made steps with parameters of the modules of `plan`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    cut = {id(parameter) for name in plan for parameter in model.get_submodule(name).parameters(recurse=False)}
    if any(id(parameter) in cut for parameter in optimizer.state):
        raise ValueError(
            "optimizer has state of parameters that are to be cut over ranks; make it anew, and load its state by "
            "engine.load_checkpoint"
        )


def follow(optimizer: torch.optim.Optimizer, replaced: Replaced) -> None:
    """Gives an optimizer that was made before the split the parameters of now; in place."""
    for group in optimizer.param_groups:
        group["params"] = following(group["params"], replaced)


def following(parameters: Iterable[Any], replaced: Replaced) -> list[Any]:
    """Returns parameters, or param groups with them, with the parameters of now."""
    found: list[Any] = []
    for one in parameters:
        if isinstance(one, dict):
            found.append({**one, "params": following(_listed(one["params"]), replaced)})
        elif isinstance(one, tuple):  # with its name
            found.append((one[0], replaced.get(id(one[1]), one[1])))
        else:
            found.append(replaced.get(id(one), one))
    return found


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
