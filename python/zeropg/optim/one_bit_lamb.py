"""1-bit LAMB (Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed", Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeropg.compression.codec import Codec
from zeropg.optim.adam_rule import begin
from zeropg.optim.lamb import lamb_update, trust_ratio, with_decay
from zeropg.optim.layerwise import squares
from zeropg.optim.momentum_exchange import MomentumExchange
from zeropg.optim.one_bit_adam import (
    OneBitAdam,
    average_momenta,
    check_not_frozen,
    freeze,
    variance_interval_of,
)
from zeropg.optim.part import Part

# Section 4.1 and appendix A: how far the frozen coefficient may be scaled, and by how much more in one step.
_FACTORS = (0.5, 4.0)
_FACTOR_CHANGE = 0.1
_COEFFICIENT_BETA = 0.9


class OneBitLamb(OneBitAdam):
    """LAMB for `warmup_steps`, then with a frozen variance, whose momentum ranks average in one bit per element.

    Each layer's step is scaled by norm of weights / norm of update. After warm-up that coefficient is its average so
    far, scaled by how the variance of the averaged gradients has changed since.

    Arguments and errors: as `OneBitAdam`, without `variance_interval`.
    """

    tensor_state = frozenset({"exp_avg", "exp_avg_sq", "fresh_sq"})
    common_options = ("warmup_steps",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        codec: Codec | None = None,
        warmup_codec: Codec | None = None,
        clip: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup_steps=warmup_steps,
            codec=codec,
            warmup_codec=warmup_codec,
            clip=clip,
        )

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        super().check_group(group, least_lr=least_lr)
        if interval := variance_interval_of(group):
            raise ValueError(
                f"[zeropg] {type(self).__name__}: variance_interval is {interval}, and its variance stays as warm-up "
                "left it; leave it out, or use OneBitAdam"
            )

    def _update(self, parts: Sequence[Part], exchange: MomentumExchange) -> None:
        if self.averages_gradients():
            check_not_frozen(parts, type(self).__name__)
            updates = []
            for part in parts:
                begin(part)
                part.state.setdefault("coefficient", 0.0)
                updates.append(lamb_update(part))
            norms = exchange.total(squares([part.weight for part in parts], updates)).sqrt()
            for part, update, (weight, length) in zip(parts, updates, norms.tolist(), strict=True):
                coefficient = trust_ratio(weight, length)
                if weight > 0 and length > 0:
                    part.state["coefficient"] = blend(part.state["coefficient"], coefficient, _COEFFICIENT_BETA)
                part.weight.add_(update, alpha=-float(part.group["lr"]) * coefficient)
            return
        before = []
        for part in parts:
            freeze(part, type(self).__name__)
            part.state.setdefault("factor", 1.0)
            if "fresh_sq" not in part.state:
                part.state["fresh_sq"] = part.state["exp_avg_sq"].clone()
            before.append(part.own(part.state["exp_avg"]).clone())
        average_momenta(parts, exchange)
        ratios = torch.stack([fresh_ratio(part, momentum) for part, momentum in zip(parts, before, strict=True)])
        directions = [part.own(part.state["exp_avg"]) / self._denominators.of(part) for part in parts]
        updates = [with_decay(part, update) for part, update in zip(parts, directions, strict=True)]
        norms = exchange.total(squares(directions, updates)).sqrt()
        largest = exchange.largest(ratios)
        for part, update, ratio, (plain, length) in zip(parts, updates, largest.tolist(), norms.tolist(), strict=True):
            share = min(1.0, plain / length) if length > 0 else 1.0
            part.state["factor"] = next_factor(part.state["factor"], ratio * share + 1 - share)
            scale = (part.state["coefficient"] or 1.0) * part.state["factor"]
            part.weight.add_(update, alpha=-float(part.group["lr"]) * scale)


def blend(average: float, value: float, beta: float) -> float:
    """The moving average, which begins with its first value."""
    return value if average == 0 else beta * average + (1 - beta) * value


def fresh_ratio(part: Part, before: torch.Tensor) -> torch.Tensor:
    """The largest frozen / fresh deviation; takes the averaged gradient, as momenta tell it, into the fresh variance.

    before: the momentum before this step, of the elements that this rank updates.
    """
    beta1, beta2 = part.group["betas"]
    gradient = (part.own(part.state["exp_avg"]) - before * beta1) / (1 - beta1)
    fresh, frozen = part.state["fresh_sq"], part.state["exp_avg_sq"]
    fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    eps = part.group["eps"]
    ratio = (frozen.sqrt() + eps) / (fresh.sqrt() + eps)
    return torch.amax(ratio.masked_fill_(frozen == 0, 0.0)) if ratio.numel() else ratio.new_zeros(())


def next_factor(last: float, wanted: float) -> float:
    """What the frozen coefficient is scaled by: near the last step's, and within bounds."""
    near = min(max(wanted, last * (1 - _FACTOR_CHANGE)), last * (1 + _FACTOR_CHANGE))
    return min(max(near, _FACTORS[0]), _FACTORS[1])
