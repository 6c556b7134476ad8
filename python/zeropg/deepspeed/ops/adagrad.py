"""`DeepSpeedCPUAdagrad`: torch's Adagrad, for `initialize`, on zeropg's kernel."""

from __future__ import annotations

import torch

from zeropg.deepspeed.ops.adam import Params


def DeepSpeedCPUAdagrad(
    model_params: Params,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adagrad:
    """Returns torch's Adagrad. Raises ValueError for amsgrad=True and fp32_optimizer_states=False."""
    if amsgrad or not fp32_optimizer_states:
        raise ValueError(
            f"[zeropg] DeepSpeedCPUAdagrad: amsgrad={amsgrad}, fp32_optimizer_states={fp32_optimizer_states}; expected "
            "False and True"
        )
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
