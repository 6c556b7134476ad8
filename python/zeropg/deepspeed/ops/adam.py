"""`FusedAdam` and `DeepSpeedCPUAdam`: Adam and AdamW of torch or zeropg, for `initialize`, on zeropg's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zeropg.deepspeed.ops.uncorrected_adam import UncorrectedAdam
from zeropg.optim import Adam, AdamW

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def FusedAdam(
    params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Returns torch's AdamW, or with adam_w_mode=False its Adam; with bias_correction=False an `UncorrectedAdam`.

    Raises ValueError for amsgrad=True, as DeepSpeed refuses it.
    """
    if amsgrad:
        raise ValueError("[zeropg] FusedAdam: amsgrad=True is not supported by DeepSpeed's; use torch.optim.AdamW")
    if not bias_correction:
        return UncorrectedAdam(params, lr, betas, eps, weight_decay, adam_w_mode=adam_w_mode)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def DeepSpeedCPUAdam(
    model_params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """As FusedAdam; with fp32_optimizer_states=False zeropg.optim's, with moments in 16 bits.

    Raises NotImplementedError for that with bias_correction=False.
    """
    if not (bias_correction or fp32_optimizer_states):
        raise NotImplementedError(
            "[zeropg] DeepSpeedCPUAdam: moments in 16 bits are always free of their bias; leave out "
            "bias_correction=False, or fp32_optimizer_states=False"
        )
    made = FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
    if fp32_optimizer_states:
        return made
    kind = AdamW if adamw_mode else Adam
    return kind(made.param_groups, lr, betas, eps, weight_decay, state_bits=16)
