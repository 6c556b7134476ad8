"""Values of a file into a tensor that nothing shards."""

from __future__ import annotations

import torch


def put_whole(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Sets elements [start, start + values.numel()) of `target`, counted as if it were contiguous."""
    if target.is_contiguous():
        target.view(-1)[start : start + values.numel()].copy_(values)
    else:
        whole = target.contiguous()
        whole.view(-1)[start : start + values.numel()].copy_(values)
        target.copy_(whole)
