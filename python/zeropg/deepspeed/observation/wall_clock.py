"""`wall_clock_breakdown`: where the time of an update goes; and the line of `steps_per_print`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zeropg.deepspeed.monitor import MonitorMaster
from zeropg.deepspeed.observation.events import write_samples
from zeropg.deepspeed.observation.observer import PHASES, Clock, Facts, Observer, Phase, say


class WallClock(Observer):
    """Prints, on one rank, the mean times of the last updates, and tells them the monitors.

    Where the program runs `loss.backward()` itself, its backward cannot be told from what it does beside: both are in
    the time between a forward and the next call of the engine, which counts as backward then.
    """

    def __init__(
        self, clock: Clock, every: int, communication_seconds: Callable[[], float], monitor: MonitorMaster
    ) -> None:
        """every: updates between two lines. communication_seconds: of this rank, so far."""
        self._monitor = monitor
        self._clock = clock
        self._every = every
        self._communication_seconds = communication_seconds
        self._seconds: dict[str, float] = {}
        self._forward_ended: float | None = None
        self._forget()

    def begin(self, phase: Phase, inputs: Sequence[Any]) -> None:
        self._began = self._clock.now()
        if phase != "backward" and self._forward_ended is not None:
            self._seconds["backward"] += self._began - self._forward_ended
        self._forward_ended = None

    def end(self, phase: Phase) -> None:
        now = self._clock.now()
        self._seconds[phase] += now - self._began
        if phase == "forward":
            self._forward_ended = now

    def updated(self, facts: Facts) -> None:
        self._updates += 1
        self._samples += facts.samples
        if self._updates < self._every:
            return
        whole = self._clock.now() - self._start
        communication = self._communication_seconds() - self._communication
        names = {"fwd": "forward", "bwd": "backward", "step": "step"}
        parts = {short: self._seconds[phase] for short, phase in names.items()}
        times = {
            **parts,
            "rest": max(0.0, whole - sum(parts.values())),
            "update": whole,
            "communication": communication,
        }
        shown = " | ".join(f"{name}: {1e3 * seconds / self._updates:.2f}" for name, seconds in times.items())
        say(f"step={facts.step} time (ms) | {shown} | samples/s: {self._samples / whole:.1f}")
        milliseconds = {f"elapsed_time_ms_{phase}": 1e3 * self._seconds[phase] / self._updates for phase in PHASES}
        write_samples(self._monitor, milliseconds, facts.total_samples)
        self._forget()

    def _forget(self) -> None:
        """Begins a new mean."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._updates = self._samples = 0
        self._forward_ended = None
        self._start = self._began = self._clock.now()
        self._communication = self._communication_seconds()


class Progress(Observer):
    """`steps_per_print`: a line of one rank every so many updates."""

    def __init__(self, every: int, clock: Clock | None) -> None:
        """clock: for the samples per second; None leaves them out."""
        self._every = every
        self._clock = clock
        self._samples = 0
        self._start: float | None = None

    def begin(self, phase: Phase, inputs: Sequence[Any]) -> None:
        if self._clock and self._start is None:
            self._start = self._clock.now()

    def updated(self, facts: Facts) -> None:
        self._samples += facts.samples
        if facts.step % self._every:
            return
        line = f"step={facts.step}, skipped={facts.skipped}, lr={facts.lr}, mom={facts.momentum}"
        if self._clock and self._start is not None:
            now = self._clock.now()
            line += f", samples/s={self._samples / (now - self._start):.1f}"
            self._start = now
        self._samples = 0
        say(line)
