"""Deep Gradient Compression (Lin et al. 2018, "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeropg.compression.codec import CODECS, Codec
from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.momentum_exchange import Momentum, MomentumExchange
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.part import Part

_FIRST_DENSITY = 0.25  # section 3.3: sparsity rises 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 %
_DENSITY_STEP = 4

# What ranks have still to send of a parameter: (first element, values).
Debts = list[tuple[int, torch.Tensor]]


class DGC(MomentumOptimizer):
    """SGD with momentum whose ranks send the largest accumulated values only.

    Every rank adds its gradient to its own momentum, and that to what it has not sent yet; the largest of these are
    sent, and forgotten in both. What arrives is averaged, and the weights take lr times it: the momentum is in it.

    params, lr, momentum, nesterov: as torch.optim.SGD.
    weight_decay: decoupled: weights shrink by lr * weight_decay per step, which nobody has to send.
    ratio: share of the values that are sent. Or a function of the number of steps so far, instead of the warm-up.
    warmup_steps: in which the share falls from 25 % by fours to `ratio`, in stages of equal length.
    clip: norm that the gradient is clipped to: each rank clips its own to clip * sqrt(world_size) (section 3.2).

    Gradients are never averaged. Vectors and matrices below 1024 elements travel whole, in fp32, under the same
    momentum. Where ranks of a node send together, the momentum is forgotten where anything arrived.

    Raises ValueError for hyperparameters out of range.
    """

    tensor_state = whole_state = own_state = frozenset({"momentum_buffer"})

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        *,
        ratio: float | Callable[[int], float] = 0.01,
        warmup_steps: int = 0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ) -> None:
        if callable(ratio) and warmup_steps:
            raise ValueError("[zeropg] DGC: ratio is a schedule already; expected warmup_steps=0 with it")
        self.ratio = ratio
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
            },
            codec=_sparse(self._density({"steps": 0, "warmup_steps": warmup_steps})),
            warmup_codec=None,
            clip=clip,
        )

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        check_numbers("DGC", group, ["weight_decay"], ["momentum"], least_lr=least_lr)
        if not (isinstance(group["warmup_steps"], int) and group["warmup_steps"] >= 0):
            raise ValueError(f"[zeropg] DGC: warmup_steps is {group['warmup_steps']!r}; expected an integer >= 0")

    def _is_warming_up(self, group: Mapping[str, Any]) -> bool:
        return False  # densities do, gradients are never averaged

    def _density(self, group: Mapping[str, Any]) -> float:
        if callable(self.ratio):
            return self.ratio(group["steps"])
        return density_at(group["steps"], group["warmup_steps"], self.ratio)

    def _update(self, parts: Sequence[Part], exchange: MomentumExchange) -> None:
        exchange.state.use(_sparse(self._density(self.param_groups[0])))
        sent = [correct_momentum_(part) for part in parts]
        before = {
            name: [(start, values.clone()) for start, values in debts] for name, debts in exchange.debts().items()
        }
        averages = [values.clone() for values in sent]
        exchange.average([Momentum(part.parameter, mean) for part, mean in zip(parts, averages, strict=True)])
        after = exchange.debts()
        for part, own, average in zip(parts, sent, averages, strict=True):
            if exchange.encodes(part.parameter):
                name = exchange.state.known_name(part.parameter)
                arrived = was_sent(own.reshape(-1), average.reshape(-1), before.get(name, []), after.get(name, []))
                part.state["momentum_buffer"].masked_fill_(arrived.view(part.gradient.shape), 0.0)
            lr = float(part.group["lr"])
            part.weight.mul_(1 - lr * part.group["weight_decay"])
            part.weight.add_(part.own(average), alpha=-lr)


def density_at(step: int, warmup_steps: int, ratio: float) -> float:
    """The share of values that is sent in a step: 0.25, 0.0625, ... in equal stages of the warm-up, then `ratio`."""
    stages = []
    density = _FIRST_DENSITY
    while density > ratio:
        stages.append(density)
        density /= _DENSITY_STEP
    if step >= warmup_steps or not stages:
        return ratio
    return stages[step * len(stages) // warmup_steps]


def correct_momentum_(part: Part) -> torch.Tensor:
    """Takes this rank's gradient into its momentum; returns what that adds to what is to be sent (section 3.1)."""
    if not part.state:
        part.state["momentum_buffer"] = torch.zeros_like(part.gradient)
    momentum, factor = part.state["momentum_buffer"], part.group["momentum"]
    if part.group["nesterov"]:
        momentum.add_(part.gradient).mul_(factor)
        return torch.add(momentum, part.gradient)
    return torch.add(momentum.mul_(factor), part.gradient, out=momentum)


def was_sent(added: torch.Tensor, average: torch.Tensor, before: Debts, after: Debts) -> torch.Tensor:
    """Which elements this rank sent, of which it owed `before` + `added` (momentum factor masking, section 3.4).

    What another rank sends for this one's node is told by what arrived.
    """
    owed = added.float().clone()
    for start, values in before:
        owed[start : start + len(values)] += values
    sent = average != 0
    for start, values in after:  # of what was sent at most a rounding error stays, of the rest everything
        sent[start : start + len(values)] = values.abs() < 0.5 * owed[start : start + len(values)].abs()
    return sent


def _sparse(ratio: float) -> Codec:
    make: Any = CODECS["top_k"]
    codec: Codec = make(ratio)
    return codec
