"""`FiniteSteps`: leaves out the steps of a sharded optimizer whose gradients are not finite, without a loss scale."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn

from zeropg.optim.grad_scaler import has_nonfinite
from zeropg.optim.shard_optimizer import ShardedOptimizer

LOGGER = logging.getLogger("zeropg")


class FiniteSteps:
    """Stands where accelerate's optimizers have a loss scale, and scales nothing.

    A step that is left out is one that they call skipped (`step_was_skipped`), so that schedulers stay where they are.
    All ranks leave it out alike.
    """

    def __init__(self) -> None:
        self._norm: tuple[nn.Module, torch.Tensor] | None = None

    def saw(self, model: nn.Module, norm: torch.Tensor) -> None:
        """Takes a norm of all gradients that the next step of the model's optimizer is made of; the same on all ranks.

        It spares that step a look at them.
        """
        self._norm = (model, norm)

    def step(self, optimizer: ShardedOptimizer, closure: Any = None) -> Any:
        """Steps the optimizer, unless a gradient is not finite on some rank: then returns None. Collective."""
        seen, self._norm = self._norm, None
        if seen is not None and seen[0] is optimizer._model:
            is_finite = math.isfinite(seen[1])
        else:
            is_finite = not has_nonfinite(optimizer)
        if is_finite:
            return optimizer.step(*([] if closure is None else [closure]))
        if optimizer._core.rank == 0:
            LOGGER.warning("[zeropg] step: gradients are not finite; this step is left out")
        return None

    def update(self) -> None:
        """There is no scale to adapt."""
