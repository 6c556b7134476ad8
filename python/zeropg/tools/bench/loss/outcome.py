"""A training run that is to be made, and what it gave."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """One training run. `timed`: a few steps whose times and bytes are wanted, without validation."""

    task: str
    arm: str
    lr_factor: float
    seed: int
    steps: int
    validate_every: int = 0
    timed: bool = False


@dataclass
class Outcome:
    """What a job gave. Seconds are of the slowest rank, bytes what all hosts' interfaces sent, headers included."""

    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, validation loss)
    accuracy_percent: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    bytes_per_step: float = 0.0
    encode_seconds: float = 0.0  # a step; the mean over ranks, like the two below
    decode_seconds: float = 0.0
    wire_seconds: float = 0.0  # of zeropg's collectives, less the two above
    parameters: int = 0

    def typical_step(self, cycle: int) -> float:
        """The median step, in seconds; of `cycle` steps that differ and repeat, the mean of each one's median."""
        kinds = [self.step_seconds[at::cycle] for at in range(cycle)]
        return statistics.fmean(statistics.median(seconds) for seconds in kinds if seconds)
