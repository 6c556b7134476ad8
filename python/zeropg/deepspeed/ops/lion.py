"""`FusedLion` and `DeepSpeedCPULion`: zeropg's Lion with DeepSpeed's defaults, for `initialize`."""

from __future__ import annotations

from zeropg.deepspeed.ops.adam import Params
from zeropg.optim import Lion


def FusedLion(
    params: Params,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> Lion:
    """Returns zeropg.optim.Lion; an element whose direction is 0 stays. set_grad_none: without effect."""
    return Lion(params, lr, betas, weight_decay)


def DeepSpeedCPULion(
    model_params: Params,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> Lion:
    """As FusedLion. Raises NotImplementedError for fp32_optimizer_states=False."""
    if not fp32_optimizer_states:
        raise NotImplementedError(
            "[zeropg] DeepSpeedCPULion: fp32_optimizer_states=False is not available; leave it out, or use "
            "zeropg.optim.AdamW(state_bits=16), whose two moments take as many bytes"
        )
    return Lion(model_params, lr, betas, weight_decay)
