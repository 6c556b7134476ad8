"""The loss scale of fp16: static, or dynamic with DeepSpeed's hysteresis and window."""

from __future__ import annotations

import logging
import math
from typing import Any

from zeropg.optim.grad_scaler import GradScaler

LOGGER = logging.getLogger("zeropg")

_FACTOR = 2.0
_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScaler(GradScaler):
    """A GradScaler whose scale moves as DeepSpeed's does.

    A step whose gradients overflow uses up one unit of `hysteresis`; the last unit halves the scale, down to
    `min_scale`. After each `window` good steps since the last overflow the scale doubles, and the hysteresis is full
    again; with `consecutive_hysteresis` every good step fills it.

    Args:
        scale: the scale to begin with; 1 where nothing is scaled.
        is_dynamic: False: the scale never moves.
        enabled: False: nothing is scaled and nothing is looked for.
    """

    def __init__(
        self,
        *,
        scale: float = 1.0,
        is_dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
        enabled: bool = True,
    ) -> None:
        super().__init__(init_scale=scale, enabled=enabled)
        self.is_dynamic = is_dynamic
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = hysteresis
        self._window = window
        self._hysteresis = hysteresis
        self._min_scale = min_scale
        self._consecutive = consecutive_hysteresis

    @property
    def cur_scale(self) -> float:
        return self.get_scale()

    @property
    def overflow(self) -> bool:
        """Whether a gradient since the last update was not finite on some rank; the same on every rank."""
        return any(self._found_inf.values())

    def update(self, new_scale: Any = None) -> None:
        """Moves the scale after a step. Does not communicate.

        Raises RuntimeError for an overflow at the least scale: no gradient is finite any more. Nothing has moved then.
        """
        if not self.is_enabled():
            return
        overflow = self.overflow
        try:
            next_scale = self._next_scale(overflow) if new_scale is None else new_scale
        except RuntimeError:
            self.forget()  # a program may go on
            raise
        super().update(next_scale)
        self.cur_iter += 1

    def forget(self) -> None:
        """After a step that raised: forgets what it found in the gradients. The scale stays."""
        if self.is_enabled():
            super().update(self._scale)

    def set_scale(self, value: float) -> None:
        """Sets the scale, which goes on moving where it is dynamic.

        Raises ValueError where nothing is scaled, or for what is no positive number.
        """
        if not self.is_enabled():
            raise ValueError(f"[zeropg] loss_scale: got {value}, but losses are scaled in fp16 only; leave it 1")
        if not 0 < value < math.inf:
            raise ValueError(f"[zeropg] loss_scale: got {value}, expected a finite number > 0")
        super().update(float(value))

    def state_dict(self) -> dict[str, Any]:
        """Numbers only; {} when not enabled."""
        numbers = {key: getattr(self, key) for key in _KEYS}
        return {**numbers, "is_dynamic": self.is_dynamic} if self.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave; nothing from a run without a scale, and a dynamic one's only as such."""
        if not self.is_enabled() or not (self.is_dynamic and state_dict.get("is_dynamic")):
            return
        self._scale = float(state_dict["cur_scale"])
        for key in _KEYS[1:]:
            setattr(self, key, int(state_dict.get(key, getattr(self, key))))

    def _next_scale(self, overflow: bool) -> float:
        scale = self.cur_scale
        if not self.is_dynamic:
            return scale
        if overflow:
            if self.cur_hysteresis <= 1 and scale <= self._min_scale:
                raise RuntimeError(
                    f"[zeropg] step: gradients overflow at the least loss scale, {scale:g} (fp16.min_loss_scale). The "
                    "loss itself is not finite, or fp16 is too narrow for this model: look at the loss, or use bf16"
                )
            self.last_overflow_iter = self.cur_iter
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
                return scale
            return max(scale / _FACTOR, self._min_scale)
        if self._consecutive:
            self.cur_hysteresis = self._hysteresis
        good_steps = self.cur_iter - self.last_overflow_iter - 1
        if good_steps > 0 and good_steps % self._window == 0:
            self.cur_hysteresis = self._hysteresis
            return scale * _FACTOR
        return scale
