"""The optimizer that `initialize` returns: sharded, with the names that DeepSpeed's has beside torch's."""

from __future__ import annotations

import torch

from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.optim.shard_optimizer import ShardedOptimizer


class EngineOptimizer(ShardedOptimizer):
    """What `engine.optimizer` is; the engine steps it.

    Attributes:
        loss_scaler: of the engine.
        overflow: whether the last update was left out, since gradients were not finite; the same on every rank.
    """

    loss_scaler: LossScaler
    overflow = False

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
