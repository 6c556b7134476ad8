"""One step of Adam over a part of a parameter, in torch operations."""

from __future__ import annotations

import torch

from zeropg.optim.part import Part


def begin(part: Part) -> None:
    """State of a parameter before its first step: torch.optim.AdamW's."""
    if not part.state:
        part.state["step"] = torch.tensor(0.0)
        part.state["exp_avg"] = torch.zeros_like(part.gradient)
        part.state["exp_avg_sq"] = torch.zeros_like(part.weight)


def adamw_(part: Part) -> None:
    """One step of AdamW, in the order of torch.optim's operations, which gives its bits."""
    lr = float(part.group["lr"])
    if part.group["weight_decay"] != 0:
        part.weight.mul_(1 - lr * part.group["weight_decay"])
    denominator, bias = learn(part)
    part.weight.addcdiv_(part.own(part.state["exp_avg"]), denominator, value=-lr / bias)


def learn(part: Part) -> tuple[torch.Tensor, float]:
    """Takes the averaged gradient into momentum and variance, as one more step of AdamW and of LAMB.

    Returns what the momentum is divided by: the deviation free of its bias, plus eps; and the momentum's bias.
    """
    first, second = take_in(part)
    return (part.state["exp_avg_sq"].sqrt() / second**0.5).add_(part.group["eps"]), first


def take_in(part: Part) -> tuple[float, float]:
    """Takes the averaged gradient into momentum and variance; returns their biases, by which they are too small."""
    state, gradient = part.state, part.own(part.gradient)
    beta1, beta2 = part.group["betas"]
    state["step"] += 1
    step = state["step"].item()
    state["exp_avg"].lerp_(part.gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return 1 - beta1**step, 1 - beta2**step
