"""DeepSpeed's learning-rate schedules. Each gives the same rates as DeepSpeed 0.19.8's class of its name at every step.

An iteration counts from 0 and is -1 before the first `step()`, so the first optimizer step has the rate of iteration
-1. Rates and bounds may be one number, or one for each param group.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

Rates = float | Sequence[float]
Betas = tuple[float, float]

_CYCLED_BETA2 = 0.99  # where OneCycle moves the first beta, DeepSpeed sets the second to this


class Schedule(ABC):
    """Sets the rates of an optimizer's param groups. Used as a scheduler of torch: `step()` after each optimizer step.

    Args of all schedules:
        optimizer: whose param groups get the rates, at once if `last_batch_iteration` is -1. A group that is added
            later keeps its own rate, as in DeepSpeed.
        last_batch_iteration: the iteration to go on from.

    Raise ValueError for counts below 1 and for lists that do not have one number for each param group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int):
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._apply()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Returns the rates at `last_batch_iteration`, one for each param group."""

    def get_last_lr(self) -> list[float]:
        """Returns the rates that were set last. Raises RuntimeError where none was set yet."""
        if self._last_lr is None:
            raise RuntimeError(f"[zeropg] {type(self).__name__}.get_last_lr: no rate was set yet; call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the given one, and sets its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Returns the iteration, under DeepSpeed's key."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes to the iteration of a state dict of this class or of DeepSpeed's, and sets its rates."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class LRRangeTest(Schedule):
    """min_lr * (1 + rate * iterations / step_size): to find the largest rate that trains.

    Args:
        lr_range_test_min_lr: the rate to begin with.
        lr_range_test_step_size: iterations in which the rate grows by min_lr * lr_range_test_step_rate.
        lr_range_test_staircase: grow at the end of them, not in each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        self._min_lrs = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self._step_size = _count(lr_range_test_step_size, "lr_range_test_step_size")
        self._step_rate = lr_range_test_step_rate
        self._is_staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = float(self.last_batch_iteration + 1) / self._step_size
        if self._is_staircase:
            interval = math.floor(interval)
        return [rate * (1 + self._step_rate * interval) for rate in self._min_lrs]


class OneCycle(Schedule):
    """Up from cycle_min_lr to cycle_max_lr, down again, then a decay; the first beta of Adam moves the other way.

    Args:
        decay_lr_rate, decay_mom_rate: how much the rate shrinks and the first beta grows in decay_step_size
            iterations; 0: nothing. A beta of 1 raises ValueError.
        cycle_first_step_size: iterations of the way up.
        cycle_second_step_size: of the way down; default: as many.
        cycle_first_stair_count, cycle_second_stair_count: stairs of each way; 0: a line.
        decay_step_size: 0: no decay.
        cycle_momentum: False leaves the betas alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ValueError(
                f"[zeropg] OneCycle: cycle_first_step_size is {cycle_first_step_size}, cycle_second_step_size "
                f"{second}; expected the first > 0 and the second >= 0"
            )
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._sizes = (float(cycle_first_step_size), float(second))
        self._stairs = (cycle_first_stair_count, stairs)
        self._min_lrs = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self._max_lrs = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self._decay = (decay_lr_rate, decay_mom_rate, decay_step_size)
        self._min_momenta = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self._max_momenta = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self._cycles_momentum:
            warnings.warn(
                f"[zeropg] OneCycle: {type(optimizer).__name__} has no betas, so only the learning rate moves",
                stacklevel=2,
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        pairs = zip(self._min_lrs, self._max_lrs, strict=True)
        if self.last_batch_iteration < 0:
            return list(self._min_lrs)
        if self.last_batch_iteration < sum(self._sizes):
            height = self._height()
            return [low + (high - low) * height for low, high in pairs]
        return [low / self._decayed(self._decay[0]) for low in self._min_lrs]

    def get_mom(self) -> list[Betas] | None:
        """Returns the betas at `last_batch_iteration`, one pair for each param group; None where they do not move."""
        if not self._cycles_momentum:
            return None
        if self.last_batch_iteration < 0:
            momenta = list(self._min_momenta)
        elif self.last_batch_iteration < sum(self._sizes):
            height = self._height()
            pairs = zip(self._min_momenta, self._max_momenta, strict=True)
            momenta = [high - (high - low) * height for low, high in pairs]
        else:
            momenta = [high * self._decayed(self._decay[1]) for high in self._max_momenta]
            if max(momenta) >= 1.0:
                raise ValueError(
                    f"[zeropg] OneCycle: at iteration {self.last_batch_iteration} decay_mom_rate={self._decay[1]} lets "
                    f"the first beta be {max(momenta):.4g}, expected below 1; give a smaller decay_mom_rate, or 0"
                )
        return [(momentum, _CYCLED_BETA2) for momentum in momenta]

    def _height(self) -> float:
        """Where between the lowest and the highest rate the iteration is: 0 to 1."""
        first, second = self._sizes
        total = first + second
        iteration = self.last_batch_iteration + 1
        x = 1.0 + iteration / total - math.floor(1 + iteration / total)
        ratio = first / total
        is_first = x <= ratio
        height = x / ratio if is_first else (x - 1) / (ratio - 1)
        stairs = self._stairs[0 if is_first else 1]
        if stairs > 0:
            # From whole iterations: the height is rounded, and a stair lower where it is just below one.
            within = iteration % total
            position = within * stairs / first if within <= first else (total - within) * stairs / second
            height = math.floor(position) / stairs
        return height

    def _decayed(self, rate: float) -> float:
        size = self._decay[2]
        if math.isclose(size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - sum(self._sizes) + 1) / size)

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            group["betas"] = betas


class WarmupLR(Schedule):
    """From warmup_min_lr to warmup_max_lr in warmup_num_steps iterations, and then the same.

    Args:
        warmup_max_lr: default: the rates that the param groups have.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._warmup = Warmup(warmup_num_steps, warmup_type)
        self._min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self._max_lrs = _per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self._min_lrs)
        if self.last_batch_iteration < self._warmup.steps:
            gamma = self._warmup.fraction(self.last_batch_iteration)
        else:
            gamma = self._after_warmup()
        return [low + (high - low) * gamma for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, and then down to warmup_min_lr on a line that ends at iteration total_num_steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self._total_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_of_short_run(self, total_num_steps, self._warmup)

    def _after_warmup(self) -> float:
        left = float(self._total_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self._total_steps - self._warmup.steps)))


class WarmupCosineLR(Schedule):
    """The rates of the param groups, times a ratio: up from warmup_min_ratio to 1, then down to cos_min_ratio on half a
    cosine that ends at iteration total_num_steps. Before the first step() the rates are 0."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self._warmup = Warmup(warmup_num_steps, warmup_type)
        self._total_steps = total_num_steps
        self._min_ratios = (warmup_min_ratio, cos_min_ratio)
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_of_short_run(self, total_num_steps, self._warmup)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self._base_lrs]

    def get_lr_ratio(self) -> float:
        """Returns what the rates of the param groups are multiplied by at `last_batch_iteration`."""
        warmup_min, cosine_min = self._min_ratios
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self._warmup.steps:
            return warmup_min + self._warmup.fraction(self.last_batch_iteration) * (1.0 - warmup_min)
        done = self.last_batch_iteration - self._warmup.steps + 1
        progress = min(1.0, done / max(1, self._total_steps - self._warmup.steps))
        return max(0.0, cosine_min + (1.0 - cosine_min) * ((1 + math.cos(math.pi * progress)) / 2))


class Warmup:
    """How far a warm-up is: `fraction` 0 to 1 of iterations 0 to `steps`, which are at least 2."""

    def __init__(self, steps: int, kind: str):
        if kind not in ("log", "linear"):
            raise ValueError(f"[zeropg] warmup_type is {kind!r}; expected 'log' or 'linear'")
        self.steps = max(2, _count(steps, "warmup_num_steps"))
        self._is_log = kind == "log"
        self._inverse_log = 1.0 / math.log(self.steps)

    def fraction(self, iteration: int) -> float:
        return self._inverse_log * math.log(iteration + 1) if self._is_log else iteration / self.steps


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule for schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def check_schedule(saved: dict[str, Any], scheduler: Any) -> None:
    """Raises ValueError where `saved` is the state of a scheduler of another kind: it shares no key with this one's."""
    own = scheduler.state_dict()
    if saved and own and not saved.keys() & own.keys():
        raise ValueError(
            f"the checkpoint's scheduler keeps {sorted(map(str, saved))}, yours ({type(scheduler).__name__}) keeps "
            f"{sorted(map(str, own))}; make one of the class that was saved"
        )


def _per_group(optimizer: torch.optim.Optimizer, value: Rates, name: str) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"[zeropg] {name} has {len(value)} numbers; expected one, or {groups}: one for a param group")
    return list(value)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ValueError(f"[zeropg] {name} is {value!r}; expected a whole number, at least 1")
    return int(value)


def _warn_of_short_run(schedule: Schedule, total_steps: int, warmup: Warmup) -> None:
    if total_steps < warmup.steps:
        warnings.warn(
            f"[zeropg] {type(schedule).__name__}: total_num_steps {total_steps} is less than warmup_num_steps "
            f"{warmup.steps}: the run ends during the warm-up",
            stacklevel=3,
        )
