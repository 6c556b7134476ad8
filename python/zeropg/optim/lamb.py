"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from zeropg.optim.adam_rule import begin, learn, take_in
from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.layerwise import LayerwiseOptimizer, LayerwiseRule, squares
from zeropg.optim.part import Part
from zeropg.optim.peers import Peers, Piece

# Of norm of weights / norm of update: DeepSpeed's, with which 1-bit LAMB was tried, too.
BOUNDS = (0.01, 10.0)
Correction = Literal["direction", "lr"]


class LambRule(LayerwiseRule):
    """Every parameter: what LAMB needs of the others is two sums."""

    tensor_state = frozenset({"exp_avg", "exp_avg_sq"})

    def update_(self, pieces: Sequence[Piece], peers: Peers) -> None:
        updates, rates = [], []
        for piece in pieces:
            begin(piece)
            update, rate = _update_and_rate(piece)
            updates.append(update)
            rates.append(rate)
        weights = [piece.count(piece.weight) for piece in pieces]
        lengths = [piece.count(update) for piece, update in zip(pieces, updates, strict=True)]
        norms = peers.total(squares(weights, lengths)).sqrt()
        for piece, update, rate, (weight, length) in zip(pieces, updates, rates, norms.tolist(), strict=True):
            coefficient = trust_ratio(weight, length, piece.group["bounds"])
            piece.weight.add_(update, alpha=-rate * coefficient)


class LAMB(LayerwiseOptimizer):
    """Adam with decoupled weight decay whose step of each parameter is scaled by norm of weights / norm of step.

    Over a sharded model (`zeropg.shard_optimizer`, stages 0 to 3) each rank steps its own elements. A step's traffic is
    one all-reduce of 16 bytes per parameter tensor. 4 bytes per element of this rank are needed during the step.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW.
    bounds: between which the scale is held.
    correction: of the bias of momentum and variance: "direction" takes it out of both before the scale is computed, as
      in the paper. "lr" multiplies lr by sqrt(1 - betas[1]^step) / (1 - betas[0]^step) instead, as DeepSpeed does: a
      warm-up, since the scale makes up for the direction's length. None: neither.
    eps_inside_sqrt: whether eps is added to the variance, and not to its root.

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
        bounds: tuple[float, float] = BOUNDS,
        correction: Correction | None = "direction",
        eps_inside_sqrt: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bounds": bounds}
        super().__init__(params, {**defaults, "correction": correction, "eps_inside_sqrt": eps_inside_sqrt})

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        check_numbers("LAMB", group, ["eps", "weight_decay"], ["betas"], least_lr=least_lr)
        check_bounds("LAMB", "bounds", group["bounds"])
        if _correction_of(group) not in ("direction", "lr", None):
            raise ValueError(
                f"[zeropg] LAMB: correction is {group['correction']!r}; expected 'direction', 'lr' or None"
            )


def check_bounds(who: str, name: str, bounds: tuple[float, float]) -> None:
    """Raises ValueError for bounds between which nothing is."""
    least, most = bounds
    if not 0 <= least <= most:
        raise ValueError(f"[zeropg] {who}: {name} are {bounds}; expected (least, most) with 0 <= least <= most")


def _correction_of(group: Mapping[str, Any]) -> Correction | None:
    """The paper's where a group was saved before there was a choice."""
    correction: Correction | None = group.get("correction", "direction")
    return correction


def _update_and_rate(part: Part) -> tuple[torch.Tensor, float]:
    """The direction before it is scaled, and the learning rate."""
    rate, correction = float(part.group["lr"]), _correction_of(part.group)
    first, second = take_in(part)
    one, two = (first, second) if correction == "direction" else (1.0, 1.0)
    update = part.own(part.state["exp_avg"]) / _denominator(part, two) / one
    return with_decay(part, update), rate * second**0.5 / first if correction == "lr" else rate


def _denominator(part: Part, bias: float) -> torch.Tensor:
    """The deviation and eps. bias: by which the variance is too small."""
    variance: torch.Tensor = part.state["exp_avg_sq"]
    if part.group.get("eps_inside_sqrt", False):  # which groups had not that were saved before there was a choice
        return (variance / bias).add_(part.group["eps"]).sqrt_()
    root: float = bias**0.5
    return (variance.sqrt() / root).add_(part.group["eps"])


def lamb_update(part: Part) -> torch.Tensor:
    """LAMB's direction before it is scaled; takes the averaged gradient into momentum and variance."""
    denominator, bias = learn(part)
    return with_decay(part, part.own(part.state["exp_avg"]) / denominator / bias)


def with_decay(part: Part, update: torch.Tensor) -> torch.Tensor:
    decay: float = part.group["weight_decay"]
    return update.add(part.weight, alpha=decay) if decay else update


def trust_ratio(weight: float, update: float, bounds: tuple[float, float] = BOUNDS) -> float:
    """norm of weights / norm of update, within bounds; 1 where either is zero."""
    if weight == 0 or update == 0:
        return 1.0
    return min(max(weight / update, bounds[0]), bounds[1])
