"""`FusedLamb`: zeropg's LAMB with DeepSpeed's defaults, for `initialize`."""

from __future__ import annotations

from zeropg.deepspeed.ops.adam import Params
from zeropg.optim import LAMB


def FusedLamb(
    params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
) -> LAMB:
    """Returns zeropg.optim.LAMB, which corrects the bias in the learning rate as DeepSpeed's does.

    Raises ValueError for amsgrad=True and another max_grad_norm than 0.
    """
    if amsgrad or max_grad_norm:
        raise ValueError(
            f"[zeropg] FusedLamb: max_grad_norm={max_grad_norm}, amsgrad={amsgrad}; expected 0 and False: clip by "
            "gradient_clipping of the configuration"
        )
    return LAMB(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        bounds=(min_coeff, max_coeff),
        correction="lr" if bias_correction else None,
        eps_inside_sqrt=eps_inside_sqrt,
    )
