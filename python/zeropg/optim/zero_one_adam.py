"""0/1 Adam (Lu et al. 2023, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", Algorithm 1),
with a synchronization in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropg.compression.codec import Codec
from zeropg.optim.one_bit_adam import OneBitAdam, freeze, refresh, variance_interval_of
from zeropg.optim.part import Part

_UNTIL = 100_000  # also of groups that were made without it


class ZeroOneAdam(OneBitAdam):
    """AdamW whose variance learns in ever fewer steps; in all others ranks average momenta in one bit per element.

    The variance learns from averaged gradients: in the first `warmup_steps` steps, which are those of AdamW, then in as
    many second ones, as many fourth ones, and so on up to step `variance_until`. So there is no long warm-up to choose,
    and for long runs traffic is that of the one-bit steps.

    The paper's local steps, between which ranks' weights differ, are not taken: every step synchronizes.

    Arguments and errors: as `OneBitAdam`, without `variance_interval`. Option of param groups beside, one for all:

    variance_until: the last step in which the variance may learn; about where the learning rate has risen.

    An element whose averaged gradient was zero until now begins with the first such step in which it is not, and until
    then it is moved by weight decay alone. The variance is free of its bias throughout.
    """

    common_options = ("warmup_steps", "variance_until")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int = 16,
        variance_until: int = _UNTIL,
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
        for made in (self.defaults, *self.param_groups):
            made.setdefault("variance_until", variance_until)
        for group in self.param_groups:
            self.check_group(group)

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        super().check_group(group, least_lr=least_lr)
        until = _until(group)
        if not (isinstance(until, int) and until >= 1) or isinstance(until, bool):
            raise ValueError(
                f"[zeropg] ZeroOneAdam: variance_until is {until!r}; expected the number of a step, at least 1"
            )
        if interval := variance_interval_of(group):
            raise ValueError(
                f"[zeropg] ZeroOneAdam: variance_interval is {interval}, and its interval doubles by itself; leave it "
                "out, or use OneBitAdam"
            )

    def _is_warming_up(self, group: Mapping[str, Any]) -> bool:
        return bool(group["steps"] < min(group["warmup_steps"], _until(group)))

    def averages_gradients(self) -> bool:
        """Whether the next step wants averaged gradients: where the variance learns."""
        group = self.param_groups[0]
        return variance_learns(group["steps"] + 1, group["warmup_steps"], _until(group))

    def _freeze(self, part: Part) -> None:
        is_first = "momentum_scale" not in part.state
        freeze(part, "ZeroOneAdam")
        if is_first:
            part.state["variance_updates"] = int(part.state["step"].item())

    def _refresh(self, part: Part) -> None:
        state, beta2 = part.state, part.group["betas"][1]
        updates = state["variance_updates"]
        state["variance_updates"] = updates + 1
        stays = state["exp_avg_sq"] != 0
        refresh(part, beta2 * (1 - beta2**updates) / (1 - beta2 ** (updates + 1)))
        # What begins has the square of its gradient and of its momentum, which is noise of encodings there: by a
        # smaller deviation the step would be long.
        gradient, momentum = part.own(part.gradient), part.own(state["exp_avg"])
        beginning = (gradient.square() + momentum.square()).masked_fill_(stays | (gradient == 0), 0.0)
        state["exp_avg_sq"].add_(beginning)


def variance_learns(step: int, per_interval: int, until: int) -> bool:
    """Whether the variance learns in a step, counted from 1: in multiples of an interval that begins with 1 and doubles
    after each `per_interval` of them, up to step `until`."""
    interval, last = 1, per_interval
    while step > last:
        interval *= 2
        last = (last // interval + per_interval) * interval
    return step <= until and step % interval == 0


def _until(group: Mapping[str, Any]) -> int:
    until: int = group.get("variance_until", _UNTIL)
    return until
