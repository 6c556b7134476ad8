"""1-bit LAMB (Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed", Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeropg.compression.codec import Codec
from zeropg.optim.adam_rule import begin
from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.lamb import BOUNDS, check_bounds, lamb_update, trust_ratio, with_decay
from zeropg.optim.layerwise import squares
from zeropg.optim.momentum_exchange import MomentumExchange
from zeropg.optim.one_bit_adam import (
    OneBitAdam,
    average_momenta,
    check_not_frozen,
    variance_interval_of,
)
from zeropg.optim.part import Part

# Section 4.1 and appendix A; also of groups that were saved before these were options.
_OPTIONS: dict[str, Any] = {
    "bounds": BOUNDS,
    "coefficient_beta": 0.9,
    "factor_bounds": (0.5, 4.0),
    "factor_change": 0.1,
}


class OneBitLamb(OneBitAdam):
    """LAMB for `warmup_steps`, then with a frozen variance, whose momentum ranks average in one bit per element.

    Each layer's step is scaled by norm of weights / norm of update. After warm-up that coefficient is its average so
    far, scaled by how the variance of the averaged gradients has changed since.

    Arguments and errors: as `OneBitAdam`, without `variance_interval`. Options of param groups beside:

    bounds: between which the coefficient is held during warm-up.
    coefficient_beta: of its average.
    factor_bounds: between which the average may be scaled after warm-up.
    factor_change: how much more or less, in parts, one step may scale it than the one before.
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
        bounds: tuple[float, float] = _OPTIONS["bounds"],
        coefficient_beta: float = _OPTIONS["coefficient_beta"],
        factor_bounds: tuple[float, float] = _OPTIONS["factor_bounds"],
        factor_change: float = _OPTIONS["factor_change"],
    ) -> None:
        options = {
            "bounds": bounds,
            "coefficient_beta": coefficient_beta,
            "factor_bounds": factor_bounds,
            "factor_change": factor_change,
        }
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
        for made in (self.defaults, *self.param_groups):
            made.update({key: value for key, value in options.items() if key not in made})
        for group in self.param_groups:
            self.check_group(group)

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        super().check_group(group, least_lr=least_lr)
        who = type(self).__name__
        own = {"lr": group["lr"], **{key: _option(group, key) for key in _OPTIONS}}
        check_numbers(who, own, ["factor_change"], ["coefficient_beta"], least_lr=least_lr)
        for name in ("bounds", "factor_bounds"):
            check_bounds(who, name, own[name])
        if interval := variance_interval_of(group):
            raise ValueError(
                f"[zeropg] {who}: variance_interval is {interval}, and its variance stays as warm-up "
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
                coefficient = trust_ratio(weight, length, _option(part.group, "bounds"))
                if weight > 0 and length > 0:
                    beta = _option(part.group, "coefficient_beta")
                    part.state["coefficient"] = blend(part.state["coefficient"], coefficient, beta)
                part.weight.add_(update, alpha=-float(part.group["lr"]) * coefficient)
            return
        before = []
        for part in parts:
            self._freeze(part)
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
            part.state["factor"] = next_factor(part.state["factor"], ratio * share + 1 - share, part.group)
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


def next_factor(last: float, wanted: float, group: Mapping[str, Any]) -> float:
    """What the frozen coefficient is scaled by: near the last step's, and within bounds."""
    change, (least, most) = _option(group, "factor_change"), _option(group, "factor_bounds")
    near = min(max(wanted, last * (1 - change)), last * (1 + change))
    return float(min(max(near, least), most))


def _option(group: Mapping[str, Any], key: str) -> Any:
    return group.get(key, _OPTIONS[key])
