"""Calls of `fully_shard` on submodules, before that on the model around them, of which they become units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropg.tensor_parallel.distributed import follow_dtype, is_distributed, local_of


@dataclass(frozen=True)
class Asked:
    """What a call asked for. chosen: the options that are not the defaults, and `ignored_params` by identity."""

    chosen: Mapping[str, Any]
    ignored: frozenset[int]


def asked_of(
    options: Mapping[str, Any], defaults: Mapping[str, Any], ignored_params: Iterable[nn.Parameter] | None
) -> Asked:
    """Options without a default are always chosen."""
    chosen = {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}
    return Asked(chosen, frozenset(map(id, ignored_params or ())))


def check_inner_calls(module: nn.Module, options: Mapping[str, Any], ignored: frozenset[int]) -> None:
    """Raises ValueError where a submodule's call asked for what this one, with `options`, does not give."""
    for name, child in module.named_modules():
        asked: Asked | None = vars(child).get("_zeropg_asked")
        if child is module or asked is None:
            continue
        for option, value in asked.chosen.items():
            if option in options and options[option] != value:
                raise ValueError(
                    f"[zeropg] fully_shard: its call on the submodule {name!r} had {option}={value}, this one has "
                    f"{option}={options[option]}, and one model has one value for all of it; give the same in both "
                    "calls, or in this one alone."
                )
        for parameter_name, parameter in child.named_parameters():
            if id(parameter) in asked.ignored - ignored:
                raise ValueError(
                    f"[zeropg] fully_shard: its call on the submodule {name!r} ignores the parameter "
                    f"{parameter_name!r}, this one does not; name it in the ignored_params of both."
                )


def inner_units(module: nn.Module) -> list[nn.Module] | None:
    """Submodules that a call of fully_shard on them has marked."""
    marked = [child for child in module.modules() if child is not module and getattr(child, "_zeropg_is_unit", False)]
    return marked or None


def absorb_inner_calls(module: nn.Module) -> None:
    """Gives back the parameters of submodules that were sharded by themselves; the call on `module` shards them."""
    for child in module.modules():
        state = getattr(child, "_zeropg_state", None)
        if state is not None:
            state.core.dissolve()
            state.is_absorbed = True  # optimizers and averages keep it
            del vars(child)["_zeropg_state"], vars(child)["_zeropg"]
            for plan in state.plans:
                del vars(plan.module)["_zeropg_unit"]
                for _, parameter in plan.parameters:
                    _forget_gradient_hooks(parameter)


def _forget_gradient_hooks(parameter: nn.Parameter) -> None:
    """Where an optimizer keeps the former core, this would still take the gradients. They come through the node that
    accumulates them, which torch replaces with data of another dtype; hooks of users are on the parameter itself."""
    if is_distributed(parameter):
        local = local_of(parameter)
        follow_dtype(parameter, torch.float16 if parameter.dtype == torch.float32 else torch.float32)
        follow_dtype(parameter, local.dtype)
        return
    value = parameter.data
    if value.is_floating_point():
        parameter.data = value.new_empty(0, dtype=torch.float16 if value.dtype == torch.float32 else torch.float32)
        parameter.data = value
