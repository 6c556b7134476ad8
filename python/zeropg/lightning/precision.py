"""`ShardedPrecision`: how Lightning clips the gradients of a sharded model."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.sharding.access import clip_grad_norm_, full_gradients


class ShardedPrecision(Precision):
    """32-bit, or bf16 computation with fp32 masters, which the sharded model itself does.

    param_dtype: what the model computes in; None: its parameters' own.
    """

    def __init__(self, precision: str, param_dtype: torch.dtype | None) -> None:
        self.precision = cast(Any, precision)
        self.param_dtype = param_dtype

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """As `zeropg.clip_grad_norm_`. All ranks must call.

        Raises NotImplementedError where the optimizer steps only a part of the model, which has no norm of its own.
        """
        sharded = _sharded(optimizer)
        held = {id(parameter) for group in sharded.param_groups for parameter in group["params"]}
        for name, parameter in sharded._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise NotImplementedError(
                    f"[zeropg] gradient_clip_val: {name!r} belongs to another optimizer, and the norm is that of the "
                    "whole model; use gradient_clip_algorithm='value', or one optimizer"
                )
        clip_grad_norm_(sharded._model, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """As torch's, on the averaged gradients. All ranks must call; each holds them whole meanwhile."""
        sharded = _sharded(optimizer)
        with full_gradients(sharded._model):
            super().clip_grad_by_value(sharded, clip_val)


def sharded_precision(plugin: Precision | None) -> ShardedPrecision:
    """Returns the plugin for a sharded model that does what another one says. Raises NotImplementedError."""
    if plugin is None or isinstance(plugin, ShardedPrecision) or type(plugin) is Precision:
        return plugin if isinstance(plugin, ShardedPrecision) else ShardedPrecision("32-true", None)
    if isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed":
        return ShardedPrecision("bf16-mixed", torch.bfloat16)
    raise NotImplementedError(
        f"[zeropg] ZeroPGStrategy: precision {plugin.precision!r} ({type(plugin).__name__}) is not available; use "
        "'32-true', or 'bf16-mixed', which computes in bf16 with fp32 masters"
    )


def _sharded(optimizer: Any) -> ShardedOptimizer:
    inner = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper
    assert isinstance(inner, ShardedOptimizer)  # as ZeroPGStrategy makes them
    return inner
