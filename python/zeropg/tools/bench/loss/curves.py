"""The arithmetic of loss curves: paired differences with their intervals, paces, and when a curve reaches a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Curve = Sequence[tuple[int, float]]  # (step, validation loss), by step

# Student's t at 97.5 % for 1, 2, ... 30 degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """A mean, and the ends of its 95 % interval; not a number where one value allows none."""

    mean: float
    low: float
    high: float


def student(degrees: int) -> float:
    """The factor of a 95 % interval; beyond 30 degrees of freedom that of 30, which is a little wide."""
    if degrees < 1:
        return math.nan
    return _STUDENT[min(degrees, len(_STUDENT)) - 1]


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Of `values - baseline` pair by pair: what a lucky seed does to both cancels out."""
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Interval(mean, math.nan, math.nan)
    half = student(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def steps_to(curve: Curve, target: float) -> float:
    """The step at which the curve first falls to `target`, straight between its points; infinite where it never does.

    A curve that begins below the target reaches it at its first point, since nothing earlier is known.
    """
    if curve and curve[0][1] <= target:
        return float(curve[0][0])
    for (step, loss), (next_step, next_loss) in pairwise(curve):
        if next_loss <= target:
            return step + (next_step - step) * (loss - target) / (loss - next_loss)
    return math.inf


@dataclass(frozen=True)
class Pace:
    """What a step takes, in seconds or bytes: one of the first `warm_up_steps`, and each later."""

    each: float
    warm_up: float = 0.0
    warm_up_steps: int = 0

    def at(self, step: float) -> float:
        """What the first `step` steps take together."""
        first = min(step, self.warm_up_steps)
        return first * self.warm_up + (0.0 if step <= first else (step - first) * self.each)
