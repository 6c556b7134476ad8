"""The optimizer that `initialize` returns: sharded, with the names that DeepSpeed's has beside torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.optim.shard_optimizer import ShardedOptimizer


class EngineOptimizer(ShardedOptimizer):
    """What `engine.optimizer` is; `engine.step` steps it, and its own `step` raises RuntimeError.

    Attributes:
        loss_scaler: of the engine.
        overflow: whether the last update was left out, since gradients were not finite; the same on every rank.
    """

    loss_scaler: LossScaler
    overflow = False
    _is_engines_step = False

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        super().__init__(optimizer, model)
        self.register_step_pre_hook(_check_is_engines)

    @contextmanager
    def stepped_by_engine(self) -> Iterator[None]:
        """Inside, `step` steps."""
        self._is_engines_step = True
        try:
            yield
        finally:
            self._is_engines_step = False

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now; 1 without fp16. It may be set, alike on all ranks, between updates."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.set_scale(value)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.is_enabled() and self.loss_scaler.is_dynamic

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that was sharded: it shares param_groups and state, and does not step."""
        return self._wrapped


def _check_is_engines(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError for a step that would know neither the loss scale nor clipping, nor count."""
    if not optimizer._is_engines_step:
        raise RuntimeError(
            "[zeropg] step: the engine steps this optimizer, once its gradients are unscaled, looked through and "
            "clipped; call engine.step(), which moves the schedule and counts, too"
        )
