"""`Observer`: hears what an engine does. `Observers`: those of one engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Phase = Literal["forward", "backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


@dataclass(frozen=True)
class Facts:
    """One update that is done.

    step: how many there were with it. skipped: how many of them were left out. samples: of this one, on all ranks.
    total_samples: of all so far. loss: the mean of this rank's, where the engine has seen them. loss_scale: in fp16.
    """

    step: int
    skipped: int
    samples: int
    micro_batch: int
    lr: list[float]
    momentum: list[Any]
    total_samples: int
    loss: torch.Tensor | None
    loss_scale: float | None


class Observer:
    """Calls that do nothing: an observer has those that it needs. All are made in the thread that trains."""

    def begin(self, phase: Phase, inputs: Sequence[Any]) -> None:
        """Before the engine's forward (with its arguments), backward or step."""

    def end(self, phase: Phase) -> None:
        """After it, also where it raised."""

    def updated(self, facts: Facts) -> None:
        """After a step at a boundary, also one whose gradients were not finite."""


class Observers:
    """Calls all observers in their order; the ends in the opposite one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    @contextmanager
    def during(self, phase: Phase, inputs: Sequence[Any] = ()) -> Iterator[None]:
        for observer in self._observers:
            observer.begin(phase, inputs)
        try:
            yield
        finally:
            for observer in reversed(self._observers):
                observer.end(phase)

    def updated(self, facts: Facts) -> None:
        for observer in self._observers:
            observer.updated(facts)


class Clock:
    """Seconds, once the device has done what it was told to."""

    def __init__(self, device: torch.device, *, waits: bool = True) -> None:
        """waits: False: without waiting for the device."""
        self._device = device
        self._waits = waits and device.type == "cuda"

    def now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def say(text: str) -> None:
    """A line of rank 0 for the person who watches, beside what the program prints."""
    print(f"[zeropg] {text}", file=sys.stderr, flush=True)
