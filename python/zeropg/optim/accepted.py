"""Which optimizers can step shards, and why others cannot."""

from __future__ import annotations

from typing import Any

import torch

from zeropg.optim.kernels import FUSED, Group, Kernels, kernels_for
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.update.layerwise import kernels_beside, rule_of

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
_WHOLE_MATRIX = "its update needs whole matrices, and a shard is a flat range; use AdamW"
_REFUSED = {
    "Adafactor": "its update needs sums over rows and columns; use zeropg.optim.Adafactor, or torch.optim.Adafactor",
    "LAMB": "its update needs the norm of whole layers; use zeropg.optim.LAMB",
    "LARS": "its update needs the norm of whole layers; use SGD with warm-up",
    "LBFGS": "it needs all gradients at once and several closure calls per step; use AdamW or SGD",
    "Muon": "its update needs whole matrices, and a shard is a flat range; use zeropg.optim.Muon, or torch.optim.Muon",
    "Shampoo": _WHOLE_MATRIX,
    "SOAP": _WHOLE_MATRIX,
    "SparseAdam": "gradients of sharded models are dense; use Adam, and nn.Embedding with sparse=False",
}


def kernels_of(optimizer: Any) -> Kernels | None:
    """Returns the fused kernels for an optimizer, None where it steps without them.

    Raises TypeError for what is no optimizer, NotImplementedError, with what to use, for one that cannot step shards.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"[zeropg] shard_optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the "
            "optimizer inside a wrapper, not the wrapper"
        )
    kind = type(optimizer)
    if kernels := kernels_for(optimizer):
        return kernels
    if rule := rule_of(optimizer):
        return kernels_beside(rule)
    if isinstance(optimizer, MomentumOptimizer):
        return None
    if kind in _ELEMENTWISE or getattr(optimizer, "zeropg_elementwise", False) is True:
        return None
    for name, reason in _REFUSED.items():
        if name.lower() in kind.__name__.lower():
            raise NotImplementedError(f"[zeropg] shard_optimizer: {kind.__name__} does not work on shards: {reason}")
    known = ", ".join(dict.fromkeys((*FUSED, *(other.__name__ for other in _ELEMENTWISE))))
    raise NotImplementedError(
        f"[zeropg] shard_optimizer: {kind.__module__}.{kind.__name__} is not known to be elementwise; if the update of "
        "each element depends on that element's parameter, gradient and state alone, say so with "
        f"`{kind.__name__}.zeropg_elementwise = True`; known are {known}"
    )


def check_group(optimizer: torch.optim.Optimizer, group: Group, model: torch.nn.Module) -> None:
    """Raises for a param group whose options or parameters the optimizer cannot step in the sharded `model`."""
    _check_flags(group)
    if isinstance(optimizer, torch.optim.Muon):
        _check_matrices(group)
    known = {id(parameter) for parameter in model.parameters()}
    for position, entry in enumerate(group["params"]):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if id(parameter) not in known:
            raise ValueError(
                f"[zeropg] shard_optimizer: parameter {position} of a param group, shape {list(parameter.shape)}, "
                "is not a parameter of the sharded model; make the optimizer from model.parameters() as they are "
                "now, and a second one for other modules"
            )


def _check_matrices(group: Group) -> None:
    shapes = [list((entry[1] if isinstance(entry, tuple) else entry).shape) for entry in group["params"]]
    if others := [shape for shape in shapes if len(shape) != 2]:
        raise ValueError(
            f"[zeropg] shard_optimizer: torch.optim.Muon takes matrices only, and a param group has shapes "
            f"{others[:3]}; give the others to an optimizer of their own, or use zeropg.optim.Muon"
        )


def _check_flags(group: Group) -> None:
    for flag, why in (
        ("capturable", "a sharded step communicates, which a CUDA graph of the optimizer cannot hold"),
        ("differentiable", "a sharded step works on flat masters outside autograd"),
    ):
        if group.get(flag):
            raise NotImplementedError(
                f"[zeropg] shard_optimizer: {flag}=True is not supported: {why}; pass {flag}=False"
            )
