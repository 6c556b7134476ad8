"""`split`: a model whose linear layers are cut over neighbouring ranks, in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from zeropg.deepspeed.tensor_parallel.following import Replaced
from zeropg.deepspeed.tensor_parallel.plan import STYLES, tied_modules


def split(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> Replaced:
    """Cuts the modules of `plan` over the ranks of `mesh`, all of which must call; they get the first one's values.

    Parameters that are cut are other objects afterwards (DTensors), with the attributes of those before.
    """
    before = dict(model.named_parameters())
    flags = {name: parameter.requires_grad for name, parameter in before.items()}
    ties = [names for names in tied_modules(model) if names[0] in plan]
    styles = {name: make() for name, style in plan.items() if (make := STYLES[style].make) is not None}
    parallelize_module(model, mesh, styles)
    modules = dict(model.named_modules(remove_duplicate=False))
    for first, *others in ties:
        for name in others:
            modules[name].weight = modules[first].weight
    replaced: Replaced = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags[name])
        if parameter is not before[name]:
            vars(parameter).update(vars(before[name]))
            replaced[id(before[name])] = parameter
    for name, style in plan.items():
        if STYLES[style].sums_gradients:
            for parameter in modules[name].parameters(recurse=False):
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True).register_hook(_sum_over(mesh.get_group()))  # it may be trained later
                parameter.requires_grad_(is_trained)
    return replaced


def refuse_hooks(parameters: dict[str, nn.Parameter], plan: dict[str, str]) -> None:
    """Raises ValueError for a parameter of `plan` with hooks, which would see a part of its gradient, or nothing."""
    for name, parameter in parameters.items():
        style = plan.get(name.rpartition(".")[0])
        has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if style is not None and STYLES[style].dim is not None and has_hooks:
            raise ValueError(
                f"{name!r} has hooks, and is to be cut over ranks; register them after initialize: they see this "
                "rank's part then"
            )


def _sum_over(group: dist.ProcessGroup) -> Any:
    """A hook for parameters of modules that compute with this rank's part of their inputs alone."""

    def sum_of_parts(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total

    return sum_of_parts
