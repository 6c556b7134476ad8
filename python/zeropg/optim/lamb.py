"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeropg.optim.adam_rule import begin, learn
from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.layerwise import LayerwiseOptimizer, LayerwiseRule, squares
from zeropg.optim.part import Part
from zeropg.optim.peers import Peers, Piece

# Of norm of weights / norm of update: DeepSpeed's, with which 1-bit LAMB was tried, too.
_BOUNDS = (0.01, 10.0)


class LambRule(LayerwiseRule):
    """Every parameter: what LAMB needs of the others is two sums."""

    tensor_state = frozenset({"exp_avg", "exp_avg_sq"})

    def update_(self, pieces: Sequence[Piece], peers: Peers) -> None:
        updates = []
        for piece in pieces:
            begin(piece)
            updates.append(lamb_update(piece))
        weights = [piece.count(piece.weight) for piece in pieces]
        lengths = [piece.count(update) for piece, update in zip(pieces, updates, strict=True)]
        norms = peers.total(squares(weights, lengths)).sqrt()
        for piece, update, (weight, length) in zip(pieces, updates, norms.tolist(), strict=True):
            coefficient = trust_ratio(weight, length, piece.group["bounds"])
            piece.weight.add_(update, alpha=-float(piece.group["lr"]) * coefficient)


class LAMB(LayerwiseOptimizer):
    """Adam with decoupled weight decay whose step of each parameter is scaled by norm of weights / norm of step.

    Over a sharded model (`zeropg.shard_optimizer`, stages 0 to 3) each rank steps its own elements. A step's traffic is
    one all-reduce of 16 bytes per parameter tensor. 4 bytes per element of this rank are needed during the step.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW.
    bounds: between which the scale is held.

    Raises ValueError for hyperparameters out of range.
    """

    rule = LambRule()

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        bounds: tuple[float, float] = _BOUNDS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bounds": bounds}
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        check_numbers("LAMB", group, ["eps", "weight_decay"], ["betas"], least_lr=least_lr)
        least, most = group["bounds"]
        if not 0 <= least <= most:
            raise ValueError(
                f"[zeropg] LAMB: bounds are {group['bounds']}; expected (least, most) with 0 <= least <= most"
            )


def lamb_update(part: Part) -> torch.Tensor:
    """LAMB's direction before it is scaled; takes the averaged gradient into momentum and variance."""
    denominator, bias = learn(part)
    return with_decay(part, part.own(part.state["exp_avg"]) / denominator / bias)


def with_decay(part: Part, update: torch.Tensor) -> torch.Tensor:
    decay: float = part.group["weight_decay"]
    return update.add(part.weight, alpha=decay) if decay else update


def trust_ratio(weight: float, update: float, bounds: tuple[float, float] = _BOUNDS) -> float:
    """norm of weights / norm of update, within bounds; 1 where either is zero."""
    if weight == 0 or update == 0:
        return 1.0
    return min(max(weight / update, bounds[0]), bounds[1])
