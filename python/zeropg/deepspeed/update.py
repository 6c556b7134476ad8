"""One update of the model: unscale, clip, step or leave the step out, drop the gradients."""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist
from torch import nn

from zeropg.deepspeed.config import Config
from zeropg.deepspeed.engine_optimizer import EngineOptimizer
from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.deepspeed.tensor_parallel.same_gradients import SameGradients
from zeropg.optim.grad_scaler import has_nonfinite
from zeropg.sharding.access import clip_grad_norm_
from zeropg.sharding.state import state_of

LOGGER = logging.getLogger("zeropg")


def leaves_out_nonfinite(config: Config) -> bool:
    """Whether a step whose gradients are not finite is left out; in fp16 the loss scale does that anyway."""
    return not config.bf16.enabled or config.bf16.check_grad_overflow


class Update:
    """What engine.step does at a boundary."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        max_norm: float,
        skips: bool,
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        """max_norm: 0 clips nothing. skips: whether a step whose gradients are not finite is left out.

        sharing: the ranks that share layers with this one, where layers are cut over ranks.
        """
        assert isinstance(optimizer, EngineOptimizer)  # as initialize makes it
        self._module = module
        state = state_of(module, "step")
        self._core = state.core
        self._is_first = state.parallel.everybody.rank() == 0
        self._optimizer = optimizer
        self._scaler = scaler
        self._same_gradients = None if sharing is None else SameGradients(state, sharing)
        self._max_norm = max_norm if max_norm > 0 else math.inf
        self._skips = skips
        self.norm: torch.Tensor | None = None  # of the last update's averaged gradients, unscaled, before clipping

    def run(self, factor: float) -> bool:
        """Returns whether the model was updated; the same on every rank. Collective.

        factor: what gradients are multiplied by first, beside the loss scale.

        Raises RuntimeError, before anything communicates, where no parameter has a gradient.
        """
        if all(parameter.grad is None for parameter in self._module.parameters()):
            raise RuntimeError(
                "[zeropg] step: no parameter has a gradient; call engine.backward(loss), or loss.backward(), before "
                "engine.step()"
            )
        try:
            return self._run(factor)
        except BaseException:
            self._scaler.forget()
            raise
        finally:
            self._module.zero_grad(set_to_none=True)

    def _run(self, factor: float) -> bool:
        self._drop_unheld()
        self._scaler.unscale_(self._optimizer)
        if factor != 1:
            self._core.scale_gradients(factor)
        if self._same_gradients is not None and self._core.averages_gradients:
            self._same_gradients.check()
        # Also where nothing is clipped: programs ask for the norm, and it tells all ranks alike what is not finite.
        self.norm = clip_grad_norm_(self._module, self._max_norm) if self._core.averages_gradients else None
        if self.norm is not None:
            is_finite = math.isfinite(self.norm)
        else:  # ranks average momenta, so each one's gradient is its own
            is_finite = self._scaler.is_enabled() or not self._skips or not has_nonfinite(self._optimizer)
        if self._scaler.overflow or (self._skips and not is_finite):
            scale = f" at loss scale {self._scaler.cur_scale:g}" if self._scaler.is_enabled() else ""
            if self._is_first:
                LOGGER.warning("[zeropg] step: gradients are not finite%s; this step is left out", scale)
            self._scaler.update()
            return False
        with self._optimizer.stepped_by_engine():
            self._scaler.step(self._optimizer)
        self._scaler.update()
        return True

    def _drop_unheld(self) -> None:
        """Gradients of parameters that the optimizer does not hold count neither for the norm nor as overflow."""
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        for parameter in self._module.parameters():
            if id(parameter) not in held and parameter.grad is not None:
                parameter.grad = None
