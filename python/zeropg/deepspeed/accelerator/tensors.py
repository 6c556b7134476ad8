"""Tensors of the device, and of page-locked memory from which a GPU copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _maker(name: str, dtype: torch.dtype) -> property:
    def make(self: Tensors) -> Callable[..., torch.Tensor]:
        if torch.cuda.is_available():
            return functools.partial(torch.tensor, dtype=dtype, device="cuda")
        maker: Callable[..., torch.Tensor] = getattr(torch, name)
        return maker

    make.__doc__ = f"Makes {dtype} tensors on the device."
    return property(make)


class Tensors:
    """`FloatTensor([1.0])` and its kind make tensors of values; without a GPU, of sizes, too: they are torch's."""

    device_name: Callable[[], str]

    BFloat16Tensor = _maker("BFloat16Tensor", torch.bfloat16)
    ByteTensor = _maker("ByteTensor", torch.uint8)
    DoubleTensor = _maker("DoubleTensor", torch.float64)
    FloatTensor = _maker("FloatTensor", torch.float32)
    HalfTensor = _maker("HalfTensor", torch.float16)
    IntTensor = _maker("IntTensor", torch.int32)
    LongTensor = _maker("LongTensor", torch.int64)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the kind of device that `device_name` says."""
        return tensor.device.type == self.device_name()

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Returns a copy of a CPU tensor in page-locked memory; without a GPU the tensor itself.

        make_copy: False: the values need not be those of `tensor`; and with match_shape=False the shape is flat.
        """
        if not torch.cuda.is_available():
            return tensor
        if make_copy:
            return tensor.pin_memory()
        return tensor.new_empty(tensor.shape if match_shape else [tensor.numel()], pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in page-locked memory; never without a GPU."""
        return torch.cuda.is_available() and tensor.is_pinned()

    def unpin_memory(self, tensor: Any) -> None:
        """Nothing: page-locked memory goes with its tensor."""

    def pin_memory_alignment(self) -> int:
        """1: any address will do."""
        return 1
