"""One update of the model: unscale, clip, step or leave the step out, drop the gradients."""

from __future__ import annotations

import logging
import math

import torch
from torch import nn

from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.sharding.access import clip_grad_norm_
from zeropg.sharding.state import state_of

LOGGER = logging.getLogger("zeropg")


class Update:
    """What engine.step does at a boundary."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, max_norm: float, skips: bool
    ) -> None:
        """max_norm: 0 clips nothing. skips: whether a step whose gradients are not finite is left out."""
        self._module = module
        self._core = state_of(module, "step").core
        self._optimizer = optimizer
        self._scaler = scaler
        self._max_norm = max_norm if max_norm > 0 else math.inf
        self._skips = skips
        self.norm: torch.Tensor | None = None  # of the last update's averaged gradients, unscaled, before clipping

    def run(self) -> bool:
        """Returns whether the model was updated; the same on every rank. Collective.

        Raises RuntimeError, before anything communicates, where no parameter has a gradient.
        """
        if all(parameter.grad is None for parameter in self._module.parameters()):
            raise RuntimeError(
                "[zeropg] step: no parameter has a gradient; call engine.backward(loss), or loss.backward(), before "
                "engine.step()"
            )
        try:
            return self._run()
        finally:
            self._module.zero_grad(set_to_none=True)

    def _run(self) -> bool:
        self._scaler.unscale_(self._optimizer)
        # Also where nothing is clipped: programs ask for the norm, and it tells all ranks alike what is not finite.
        self.norm = clip_grad_norm_(self._module, self._max_norm) if self._core.averages_gradients else None
        is_finite = self.norm is None or math.isfinite(self.norm)
        if self._scaler.overflow or (self._skips and not is_finite):
            scale = f" at loss scale {self._scaler.cur_scale:g}" if self._scaler.is_enabled() else ""
            if self._core.rank == 0:
                LOGGER.warning("[zeropg] step: gradients are not finite%s; this step is left out", scale)
            self._scaler.update()
            return False
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return True
