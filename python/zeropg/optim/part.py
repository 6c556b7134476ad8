"""`Part`: one parameter, as update rules see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Part:
    """What an update rule sees of one parameter.

    gradient, and what the rule calls momentum in `state`, are whole; weight, and the rest of `state`, are elements
    [start, stop) of it where a sharded model has this rank update no more.
    """

    parameter: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    start: int
    stop: int
    group: dict[str, Any]
    state: dict[str, Any]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a whole tensor that this rank updates, in the weight's shape."""
        if whole.shape == self.weight.shape:
            return whole
        return whole.reshape(-1)[self.start : self.stop]
