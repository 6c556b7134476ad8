"""Whole values of parameters that may be cut over ranks, from and to this rank's part of them."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from zeropg.tensor_parallel.distributed import functions_of, is_distributed, local_of, part_of


def numel_here(parameter: nn.Parameter) -> int:
    """Elements of this rank's part."""
    return local_of(parameter).numel()


def whole_of(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor of which `part` (1-D) is this rank's part, cut as the parameter is.

    Collective over the ranks that share it; without communication, and a view, for a parameter that is not cut.
    """
    if not is_distributed(parameter):
        return part.view(parameter.shape)
    _, over = functions_of(parameter)
    return cast("torch.Tensor", over(part.view(local_of(parameter).shape)).full_tensor())  # type: ignore[attr-defined]


def part_of_whole(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor of the parameter's shape, 1-D. Does not communicate."""
    for dim, (offset, size) in enumerate(zip(*part_of(parameter), strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.reshape(-1)


def whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient whole. Collective over the ranks that share its parameter."""
    return cast("torch.Tensor", gradient.full_tensor()) if is_distributed(gradient) else gradient  # type: ignore[attr-defined]
