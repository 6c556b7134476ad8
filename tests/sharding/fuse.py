"""A layer that makes a backward fail."""

from __future__ import annotations

from typing import Any

import torch


class Fuse(torch.autograd.Function):
    """Raises in backward while `blown` is set."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fuse.blown:
            raise ArithmeticError("fuse")
        return gradient
