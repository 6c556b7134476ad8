"""Dynamic loss scaling for optimizers that no single rank can judge: `GradScaler`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.compression.state import State
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.optim.update.segments import segments_of
from zeropg.rank_io.agreement import collective_device

Scaled = ShardedOptimizer | MomentumOptimizer

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class GradScaler:
    """Keeps float16 gradients away from zero and infinity: `torch.amp.GradScaler` for sharded optimizers, and for those
    of zeropg.optim under DistributedDataParallel.

    The loss is multiplied by a scale, and the gradients are divided by it before the step. If a gradient is not finite
    on any rank, all ranks leave the step out and the scale shrinks; after `growth_interval` good steps it grows. All
    ranks must call `unscale_` and `step`.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                # only if the gradients are read or clipped
        zeropg.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        device: as torch.amp.GradScaler has it; without effect, since gradients are scaled where they are.
        init_scale: the scale to begin with.
        growth_factor: what the scale is multiplied by to grow, more than 1.
        backoff_factor: what the scale is multiplied by to shrink, between 0 and 1.
        growth_interval: good steps in a row before the scale grows.
        enabled: False makes every call behave as if there were no scaler.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(device, (str, torch.device, type(None))):
            raise TypeError(
                f"[zeropg] GradScaler: device is {device!r}, expected a device such as 'cpu'; the scale is init_scale="
            )
        self._scale = self._growth_factor = self._backoff_factor = 1.0
        self._growth_interval = self._growth_tracker = 0
        self._set("", (init_scale, growth_factor, backoff_factor, growth_interval, 0))
        self._enabled = enabled
        self._last_given: float | None = None  # the scale by which the last loss was multiplied
        self._spent: set[int] = set()  # optimizers that were unscaled for that loss, and not stepped before update()
        # Since the last update, by id: whether an optimizer met a gradient that was not finite; optimizers that met
        # none at all; that are unscaled; that have stepped.
        self._found_inf: dict[int, bool] = {}
        self._without_gradients: set[int] = set()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        # Compressions of gradients that this scaler has met: their residuals are in units of scaled gradients.
        self._compressed: weakref.WeakSet[_C.ShardedModule | State] = weakref.WeakSet()

    def scale(self, outputs: Any) -> Any:
        """Returns a tensor, or the tensors in nested lists and tuples, multiplied by the scale."""
        if not self._enabled:
            return outputs
        self._give()
        if isinstance(outputs, torch.Tensor):
            return outputs * torch.tensor(self._scale, dtype=torch.float32, device=outputs.device)
        if type(outputs) in (list, tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        raise TypeError(f"[zeropg] GradScaler.scale: got a {type(outputs).__name__}, expected tensors, lists or tuples")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, in place. All ranks must call.

        As torch's: where several optimizers share a model and clip it together, unscale each of them before.

        Raises RuntimeError when called twice between two updates, after `step`, and where the scale has changed since
        the loss was scaled.
        """
        if not self._enabled:
            return
        sharded = self._check(optimizer, "unscale_")
        if id(sharded) in self._unscaled:
            raise RuntimeError("[zeropg] GradScaler.unscale_: called twice for this optimizer since the last update()")
        self._unscale(sharded)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer, unless a gradient is not finite on some rank. All ranks must call.

        Returns what `optimizer.step(*args, **kwargs)` does, None where the step is left out. Raises RuntimeError, on
        every rank, where no parameter of the optimizer has a gradient, as torch's does.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise NotImplementedError("[zeropg] GradScaler.step: closures are not supported, as in torch's GradScaler")
        sharded = self._check(optimizer, "step")
        self._find_inf(sharded)
        if id(sharded) in self._without_gradients:
            for known in (self._without_gradients, self._unscaled):
                known.discard(id(sharded))
            del self._found_inf[id(sharded)]
            raise RuntimeError(
                "[zeropg] GradScaler.step: no parameter of the optimizer had a gradient on any rank; expected a "
                "backward before it, and zero_grad() after it"
            )
        if self._found_inf[id(sharded)]:
            self._stepped.add(id(sharded))
            return None
        if id(sharded) not in self._unscaled:
            sharded.gradient_factor = 1.0 / self._scale  # saves a pass over the gradients
        try:
            result = sharded.step(*args, **kwargs)
        finally:
            sharded.gradient_factor = 1.0  # also where the step did not come to use it
        self._stepped.add(id(sharded))
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale to the gradients that the steps since the last update have met, or sets it to `new_scale`.

        Does not communicate. Raises RuntimeError when there was no step() or unscale_() since the last update,
        ValueError for a scale that is not more than 0 and finite.
        """
        if not self._enabled:
            return
        before = self._scale
        if new_scale is not None:
            self._scale = _checked_scale("update", float(new_scale))
        elif not self._found_inf:
            raise RuntimeError("[zeropg] GradScaler.update: no step() or unscale_() since the last update()")
        elif any(self._found_inf.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = self._scale * self._growth_factor
                self._scale = grown if grown <= torch.finfo(torch.float32).max else self._scale
                self._growth_tracker = 0
        if self._scale != before:
            for compression in self._compressed:
                if compression.residuals is not None:
                    compression.residuals.scale(self._scale / before)
        self._spent = self._unscaled - self._stepped
        self._found_inf.clear()
        self._without_gradients.clear()
        self._unscaled.clear()
        self._stepped.clear()

    def get_scale(self) -> float:
        """Returns the scale; 1.0 when not enabled."""
        self._give()  # programs multiply losses by it
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Returns what torch's GradScaler does: numbers only; {} when not enabled."""
        return {key: getattr(self, f"_{key.lstrip('_')}") for key in _KEYS} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of torch's returned."""
        if not self._enabled:
            return
        if missing := [key for key in _KEYS if key not in state_dict]:
            raise ValueError(
                f"[zeropg] GradScaler.load_state_dict: {missing} are missing; was it saved by a scaler with "
                "enabled=False?"
            )
        self._set(".load_state_dict", tuple(state_dict[key] for key in _KEYS))

    def _set(self, call: str, numbers: tuple[Any, ...]) -> None:
        """Takes the values, not the tensors that they may be in. numbers: in the order of _KEYS."""
        scale, growth_factor, backoff_factor = map(float, numbers[:3])
        interval, tracker = map(int, numbers[3:])
        if not (growth_factor > 1 and 0 < backoff_factor < 1 and interval > 0):
            raise ValueError(
                f"[zeropg] GradScaler{call}: growth_factor {growth_factor}, backoff_factor {backoff_factor}, "
                f"growth_interval {interval}; expected growth > 1, backoff between 0 and 1, an interval > 0"
            )
        self._scale = _checked_scale(call.lstrip(".") or "init_scale", scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = interval, tracker

    def _give(self) -> None:
        self._last_given = self._scale
        self._spent = set()

    def _check(self, optimizer: torch.optim.Optimizer, call: str) -> Scaled:
        is_attached = isinstance(optimizer, MomentumOptimizer) and optimizer.exchange is not None
        if not isinstance(optimizer, ShardedOptimizer) and not is_attached:
            raise TypeError(
                f"[zeropg] GradScaler.{call}: got a {type(optimizer).__name__}, expected what zeropg.shard_optimizer "
                "returned, or an optimizer of zeropg.optim that is attached to a model; for other optimizers use "
                "torch.amp.GradScaler"
            )
        assert isinstance(optimizer, ShardedOptimizer | MomentumOptimizer)
        if id(optimizer) in self._stepped:
            raise RuntimeError(f"[zeropg] GradScaler.{call}: the optimizer has stepped already; call update() first")
        if id(optimizer) in self._spent:
            raise RuntimeError(
                f"[zeropg] GradScaler.{call}: the gradients were unscaled before update(), and would be divided once "
                "more; call step() before update(), or scale the loss of another backward"
            )
        if self._last_given not in (None, self._scale) and id(optimizer) not in self._unscaled:
            raise RuntimeError(
                f"[zeropg] GradScaler.{call}: the loss was scaled by {self._last_given:g}, and the scale is "
                f"{self._scale:g} now; call update() and load_state_dict() after the step, and not between backward "
                "and it"
            )
        return optimizer

    @torch.no_grad()
    def _unscale(self, optimizer: Scaled) -> None:
        if isinstance(optimizer, ShardedOptimizer) and optimizer._model_state is not None:
            optimizer._model_state.check_outside_full_gradients("GradScaler")
        self._find_inf(optimizer)
        self._unscaled.add(id(optimizer))
        if isinstance(optimizer, MomentumOptimizer):
            torch._foreach_mul_(optimizer.gradients(), 1.0 / self._scale)
        else:
            optimizer._core.scale_gradients_of(optimizer.own_parameters(), 1.0 / self._scale)
            for gradient in _ignored_gradients(optimizer):
                gradient.mul_(1.0 / self._scale)

    @torch.no_grad()
    def _find_inf(self, optimizer: Scaled) -> None:
        if id(optimizer) in self._found_inf:
            return
        if isinstance(optimizer, ShardedOptimizer):
            self._compressed.add(optimizer._core)
        elif optimizer.warmup_state is not None:
            self._compressed.add(optimizer.warmup_state)
        has_any, self._found_inf[id(optimizer)] = _met(optimizer, self._scale)
        if not has_any:
            self._without_gradients.add(id(optimizer))


def _checked_scale(call: str, scale: float) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(f"[zeropg] GradScaler: {call}: the scale is {scale}; expected a number > 0")
    return scale


def has_nonfinite(optimizer: Scaled) -> bool:
    """Whether a gradient that the optimizer steps by is not finite on some rank. Collective."""
    return _met(optimizer, 1.0)[1]


@torch.no_grad()
def _met(optimizer: Scaled, scale: float) -> tuple[bool, bool]:
    """Whether the optimizer has gradients to step by, and whether one is not finite, on any rank. Collective.

    Raises RuntimeError, on every rank, where `scale` differs between ranks.
    """
    if isinstance(optimizer, ShardedOptimizer):
        group = optimizer._core.process_group
    else:
        assert optimizer.exchange is not None  # as GradScaler._check says
        group = optimizer.exchange.group
    # Whether one is not finite, and whether there are any; the largest and the smallest scale.
    worst = torch.tensor([0.0, 0.0, scale, -scale], dtype=torch.float64)
    for gradient in _gradients(optimizer):
        worst[1] = 1.0
        # The largest magnitude: inf and nan come through, and no tensor of flags is made.
        if gradient.numel() > 0 and not math.isfinite(torch.linalg.vector_norm(gradient, math.inf).item()):
            worst[0] = 1.0
    worst = worst.to(collective_device(group))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if isinstance(optimizer, ShardedOptimizer) and optimizer._model_state is not None:
        optimizer._model_state.parallel.agree_on_max(worst)
    is_found, has_any, largest, smallest = worst.tolist()
    if largest != -smallest:
        raise RuntimeError(
            f"[zeropg rank {group.rank()}/{group.size()}] GradScaler: the loss scale is {scale} here, and from "
            f"{-smallest} to {largest} on all ranks; expected the same: make the scalers alike, and load all or none"
        )
    return bool(has_any), bool(is_found)


def _gradients(optimizer: Scaled) -> Iterator[torch.Tensor]:
    """Yields the gradients that this rank steps by: parts of flat ones, and ignored parameters'."""
    if isinstance(optimizer, MomentumOptimizer):
        yield from optimizer.gradients()
        return
    if not optimizer._core.averages_gradients:  # each rank has others, also outside of the part that it updates
        yield from (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        return
    own = set(map(id, optimizer.own_parameters()))
    for flat in optimizer._core.flat_groups:
        gradient = flat.grad() if flat.is_trainable else None
        if gradient is None:
            continue
        if all(id(parameter) in own for _, parameter, _, _ in flat.slots):
            yield gradient  # in one piece
        else:
            yield from (gradient[part.start : part.stop] for part in segments_of(flat) if id(part.parameter) in own)
    yield from _ignored_gradients(optimizer)


def _ignored_gradients(optimizer: ShardedOptimizer) -> Iterator[torch.Tensor]:
    sharded = {id(parameter) for flat in optimizer._core.flat_groups for _, parameter, _, _ in flat.slots}
    for parameter in optimizer.own_parameters():
        if id(parameter) not in sharded and parameter.grad is not None:
            yield parameter.grad
