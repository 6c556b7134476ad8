"""`FusedAdam` and `DeepSpeedCPUAdam`: torch's Adam and AdamW, which `initialize` hands to zeropg's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

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
    """Returns torch's AdamW, or with adam_w_mode=False its Adam.

    Raises NotImplementedError for bias_correction=False, ValueError for amsgrad=True, as DeepSpeed refuses it.
    """
    if not bias_correction:
        raise NotImplementedError("[zeropg] FusedAdam: bias_correction=False is not available; leave it out")
    if amsgrad:
        raise ValueError("[zeropg] FusedAdam: amsgrad=True is not supported by DeepSpeed's; use torch.optim.AdamW")
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
    """As FusedAdam. Raises NotImplementedError also for fp32_optimizer_states=False."""
    if not fp32_optimizer_states:
        raise NotImplementedError("[zeropg] DeepSpeedCPUAdam: optimizer states are fp32; leave the argument out")
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
