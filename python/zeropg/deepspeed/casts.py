"""Casts and moves of an engine by nn.Module's methods: none, or an error that says where to ask for it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

Engine = TypeVar("Engine", bound="CastEngine")


class CastEngine:
    """The part of DeepSpeedEngine that answers `half`, `to` and their like.

    The configuration decides in which dtype a model computes, and masters, shards and buffers hang on it; so a call
    returns the engine where the model is like that already, and raises RuntimeError, with what to use, else.
    """

    module: nn.Module

    def half(self: Engine) -> Engine:
        return _checked(self, torch.float16)

    def bfloat16(self: Engine) -> Engine:
        return _checked(self, torch.bfloat16)

    def float(self: Engine) -> Engine:
        return _checked(self, torch.float32)

    def double(self: Engine) -> Engine:
        return _checked(self, torch.float64)

    def cpu(self: Engine) -> Engine:
        return self.to("cpu")

    def cuda(self: Engine, device: int | torch.device | None = None) -> Engine:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def type(self: Engine, dst_type: torch.dtype | str) -> Engine:
        return _checked(self, torch.empty(0).type(dst_type).dtype)

    def to(self: Engine, *args: Any, **kwargs: Any) -> Engine:
        """As nn.Module's. Raises RuntimeError for another dtype, or where a parameter is elsewhere."""
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None:
            raise RuntimeError(
                "[zeropg] engine.to: a memory format changes how parameters lie, which shards do not have; call "
                "model.to(memory_format=...) before initialize"
            )
        for name, tensor in self.module.named_parameters() if device is not None else ():
            if not _is_there(tensor.device, device):
                raise RuntimeError(
                    f"[zeropg] engine.to: '{name}' is on {tensor.device}, and shards stay where they are, not on "
                    f"{device}. Move the model before initialize; engine.offload_states() frees a device between steps"
                )
        return self if dtype is None else _checked(self, dtype)


def _checked(engine: Engine, dtype: torch.dtype) -> Engine:
    """Raises RuntimeError where a floating parameter has another dtype. Buffers may: a model keeps some in fp32."""
    for name, tensor in engine.module.named_parameters():
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise RuntimeError(
                f"[zeropg] engine cast to {dtype}: '{name}' is {tensor.dtype}, as the configuration or the model says. "
                "Cast the model before initialize, or say it by bf16.enabled, fp16.enabled or data_types of the "
                "configuration; zeropg.full_state_dict(engine.module, dtype=...) casts a copy"
            )
    return engine


def _is_there(own: torch.device, asked: torch.device) -> bool:
    if own.type != asked.type:
        return False
    return asked.index is None or own.index in (None, asked.index)
