"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeropg.optim.checked_groups import CheckedOptimizer, check_numbers


class Lion(CheckedOptimizer):
    """Moves each element by lr against the sign of its blended momentum: one state tensor, where Adam keeps two.

    Through `zeropg.shard_optimizer` it runs on a fused kernel on the CPU, in every stage, also with offload_optimizer.

    params, weight_decay, maximize: as torch.optim.AdamW; weight decay is decoupled. The paper takes a tenth to a third
      of AdamW's lr and three to ten times its weight_decay.
    betas: of the blend that gives the direction, and of the momentum that is kept.

    A direction of 0 does not move an element; one of NaN makes it NaN.

    Raises ValueError for hyperparameters out of range.
    """

    zeropg_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        check_numbers("Lion", group, ["weight_decay"], ["betas"], least_lr=least_lr)

    def update_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        lion_(parameter, gradient, self.state[parameter], group)


def lion_(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of one parameter."""
    beta1, beta2 = group["betas"]
    gradient = -gradient if group["maximize"] else gradient
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(weight)
    momentum = state["exp_avg"]
    blend = momentum.mul(beta1).add_(gradient, alpha=1 - beta1)
    direction = blend.sign().masked_fill_(blend.isnan(), torch.nan)
    weight.mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(direction, alpha=-float(group["lr"]))
    momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
