"""1-bit Adam (Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", Algorithm 1), and the variance of 0/1 Adam (Lu et al. 2023, "Maximizing Communication Efficiency for Large-scale
Training via 0/1 Adam", section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zeropg.compression.codec import CODECS, Codec
from zeropg.optim.adam_rule import adamw_, begin
from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.momentum_exchange import Momentum, MomentumExchange
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.part import Part


class OneBitAdam(MomentumOptimizer):
    """AdamW for `warmup_steps`, then Adam with a frozen variance, whose momentum ranks average in one bit per element.

    Adam's variance is not linear in the gradient, so an encoded gradient spoils it; the momentum is, and error feedback
    makes up for what its encoding loses.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW; weight decay is decoupled.
    warmup_steps: of plain AdamW, for which gradients are averaged as usual. 15 to 25 % of all steps, and at least as
      long as the learning rate rises.
    codec: of the momentum. Default: OneBit().
    warmup_codec: of the gradients during warm-up, e.g. BlockQuant(4); default: none.
    variance_interval: after warm-up, every so many steps are one in which gradients are averaged as during warm-up and
      the variance learns from them, as 0/1 Adam does; with weight 1 - betas[1]^interval, so that it forgets as fast as
      AdamW's. 0: never, as in 1-bit Adam. With 10 and a warmup_codec the loss follows AdamW's more closely for few more
      bytes, also after a shorter warm-up. An option of param groups, the same in all.
    clip: norm to which the gradient is clipped before the momentum; after warm-up each rank clips its own, to
      clip * sqrt(world_size). torch's clip_grad_norm_ would clip to `clip` itself.

    From the end of warm-up on `exp_avg_sq` is free of its bias, and stays but for the steps of `variance_interval`.
    Elements whose variance is zero, such as rows of an embedding that nobody has used, are moved by weight decay alone.
    Vectors and matrices below 1024 elements travel in fp32.

    Raises ValueError for hyperparameters out of range, TypeError for something that is no codec.
    """

    tensor_state = frozenset({"exp_avg", "exp_avg_sq"})
    whole_state = frozenset({"exp_avg"})
    common_options: tuple[str, ...] = ("warmup_steps", "variance_interval")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        codec: Codec | None = None,
        warmup_codec: Codec | None = None,
        clip: float | None = None,
        variance_interval: int = 0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
                "variance_interval": variance_interval,
            },
            codec=CODECS["one_bit"]() if codec is None else codec,
            warmup_codec=warmup_codec,
            clip=clip,
        )
        self._denominators = FrozenDenominators()

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        who = type(self).__name__
        check_numbers(who, group, ["eps", "weight_decay"], ["betas"], least_lr=least_lr)
        warmup_steps = group["warmup_steps"]
        if not (isinstance(warmup_steps, int) and warmup_steps >= 1):
            raise ValueError(
                f"[zeropg] {who}: warmup_steps is {warmup_steps!r}; expected an integer >= 1: 15 to 25 % of all steps, "
                "in which the variance is learnt that is frozen then"
            )
        interval = variance_interval_of(group)
        if not (isinstance(interval, int) and interval >= 0) or isinstance(interval, bool):
            raise ValueError(
                f"[zeropg] {who}: variance_interval is {interval!r}; expected a number of steps such as 10, or 0 for a "
                "variance that stays as warm-up left it"
            )

    def _is_warming_up(self, group: Mapping[str, Any]) -> bool:
        return bool(group["steps"] < group["warmup_steps"])

    def averages_gradients(self) -> bool:
        """Whether the next step wants averaged gradients: during warm-up, and where the variance learns."""
        group = self.param_groups[0]
        interval, since = variance_interval_of(group), group["steps"] + 1 - group["warmup_steps"]
        return self._is_warming_up(group) or (interval > 0 and since % interval == 0)

    def _update(self, parts: Sequence[Part], exchange: MomentumExchange) -> None:
        if self._is_warming_up(self.param_groups[0]):
            check_not_frozen(parts, type(self).__name__)
            for part in parts:
                begin(part)
                adamw_(part)
            return
        for part in parts:
            self._freeze(part)
        if self.averages_gradients():
            for part in parts:
                self._refresh(part)
        else:
            average_momenta(parts, exchange)
        frozen_adam_(parts, self._denominators)

    def _freeze(self, part: Part) -> None:
        freeze(part, type(self).__name__)

    def _refresh(self, part: Part) -> None:
        refresh(part, part.group["betas"][1] ** variance_interval_of(part.group))


def variance_interval_of(group: Mapping[str, Any]) -> int:
    """0 where the group was saved before there were any."""
    interval: int = group.get("variance_interval", 0)
    return interval


def freeze(part: Part, who: str) -> None:
    """At the first step after warm-up: the variance stays as it is, free of its bias.

    The momentum's size is kept beside it: tensors that share a block of an encoding are divided by it (Li et al. 2021,
    "1-bit LAMB", section 4.2). Raises ValueError for a parameter without variance, which could never move.
    """
    state = part.state
    if "momentum_scale" in state:
        return
    if not state:
        raise ValueError(
            f"[zeropg] {who}.step: a parameter of shape {list(part.parameter.shape)} got its first gradient after "
            "warm-up, in which its variance would have been learnt; train all parameters from the beginning, or make "
            "another optimizer for the new phase"
        )
    state["exp_avg_sq"].div_(1 - part.group["betas"][1] ** state["step"].item())
    rms = (torch.linalg.vector_norm(state["exp_avg"].float()) / max(1, state["exp_avg"].numel()) ** 0.5).item()
    state["momentum_scale"] = rms if rms > 0 else 1.0


def refresh(part: Part, kept: float) -> None:
    """Takes an averaged gradient into the momentum, and into the variance, of which the share `kept` stays.

    A variance of zero stays: the momentum there is noise of encodings, which a small deviation would make large.
    """
    state = part.state
    state["step"] += 1
    state["exp_avg"].lerp_(part.gradient, 1 - part.group["betas"][0])
    gradient = part.own(part.gradient).masked_fill(state["exp_avg_sq"] == 0, 0.0)
    state["exp_avg_sq"].mul_(kept).addcmul_(gradient, gradient, value=1 - kept)


def check_not_frozen(parts: Sequence[Part], who: str) -> None:
    """Raises RuntimeError where warm-up goes on after it has ended: a frozen variance is no longer what it learns."""
    if any("momentum_scale" in part.state for part in parts):
        raise RuntimeError(
            f"[zeropg] {who}.step: warm-up was over, and warmup_steps of the param groups says now that it is not; set "
            "it before warm-up ends, or make another optimizer for the new phase"
        )


class FrozenDenominators:
    """What momenta are divided by once the variance is frozen: the deviation plus eps.

    Infinite where the deviation is zero: there only noise of encodings arrives. Kept from step to step, 4 bytes per
    element that this rank updates; computed again where the variance or eps is another, as after loading.
    """

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()  # parameter -> (variance, its version, eps, denominator)

    def of(self, part: Part) -> torch.Tensor:
        variance, eps = part.state["exp_avg_sq"], part.group["eps"]
        known = self._known.get(part.parameter)
        if known is None or known[0] is not variance or known[1:3] != (variance._version, eps):
            deviation = variance.sqrt()
            denominator = deviation.add(eps).masked_fill_(deviation == 0, torch.inf)
            known = self._known[part.parameter] = (variance, variance._version, eps, denominator)
        kept: torch.Tensor = known[3]
        return kept


def average_momenta(parts: Sequence[Part], exchange: MomentumExchange) -> None:
    """Every rank's momentum takes in its own gradient, and becomes the average of all ranks'. Collective."""
    for group, members in _by_group(parts):
        torch._foreach_add_([part.state["step"] for part in members], 1)
        momenta = [part.state["exp_avg"] for part in members]
        torch._foreach_lerp_(momenta, [part.gradient for part in members], 1 - group["betas"][0])
    exchange.average([Momentum(part.parameter, part.state["exp_avg"], part.state["momentum_scale"]) for part in parts])


def frozen_adam_(parts: Sequence[Part], denominators: FrozenDenominators) -> None:
    """One step of AdamW whose variance is frozen; the momentum's own bias goes on to vanish."""
    for group, members in _by_group(parts):
        lr, beta1 = float(group["lr"]), group["betas"][0]
        weights = [part.weight for part in members]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(
            weights,
            [part.own(part.state["exp_avg"]) for part in members],
            [denominators.of(part) for part in members],
            [-lr / (1 - beta1 ** part.state["step"].item()) for part in members],
        )


def _by_group(parts: Sequence[Part]) -> Iterator[tuple[dict[str, Any], list[Part]]]:
    """The parts of each param group: what they do together costs one call."""
    members: dict[int, list[Part]] = {}
    for part in parts:
        members.setdefault(id(part.group), []).append(part)
    for together in members.values():
        yield together[0].group, together
