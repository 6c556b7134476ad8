"""The blocks that say in which dtype a model computes, accumulates and communicates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeropg.deepspeed.config.blocks.section import Count, Positive, Section

Dtype = Literal[
    "fp32", "float32", "float", "torch.float32", "fp16", "float16", "half", "torch.float16", "bf16", "bfloat16",
    "torch.bfloat16",
]  # fmt: skip


class Fp16(Section):
    """`fp16`: float16 with a scaled loss. `loss_scale` 0 is a dynamic scale that begins at 2**initial_scale_power."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    initial_scale_power: Annotated[Count, Field(le=126)] = 16  # the scale, and the next one, are numbers of fp32
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Positive = 1
    fp16_master_weights_and_grads: bool = False


class Bf16(Section):
    """`bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class TorchAutocast(Section):
    """`torch_autocast`."""

    enabled: bool = False
    dtype: Dtype | None = None
    lower_precision_safe_modules: tuple[str, ...] | None = None


class DataTypes(Section):
    """`data_types`."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Literal["auto"] | tuple[str, ...] = "auto"
