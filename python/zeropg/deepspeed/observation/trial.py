"""A trial of `python -m zeropg tune`: the engine says how fast it is, and ends the program after some updates.

The variable ZEROPG_TUNE_TRIAL asks for it. It holds JSON, the fields of `Trial`.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.deepspeed.observation.observer import Clock, Facts, Observer, Phase
from zeropg.sharding.nested import tensors_in
from zeropg.sharding.units import plan_units

VARIABLE = "ZEROPG_TUNE_TRIAL"
_MOST_SKIPPED = 100  # twice as many as a scale of 2**24 takes to come down to 1 with DeepSpeed's hysteresis


@dataclass(frozen=True)
class Trial:
    """report: a file, which rank 0 writes. steps: that are timed, after `warm_up` others; 0: only `Sizes` are asked.

    A step that is left out, since gradients were not finite, is none of them: it costs less.
    """

    report: str
    warm_up: int
    steps: int


@dataclass(frozen=True)
class Report:
    """What a trial found out.

    seconds: of each update, on rank 0. rows: length of the first dimension of what the program gave the model last;
    None where it gave no tensor. peak_bytes: the most memory of each rank, on the device that computes.
    """

    seconds: list[float]
    samples: int
    micro_batch: int
    rows: int | None
    peak_bytes: list[int]


@dataclass(frozen=True)
class Sizes:
    """The model before it is sharded. units: for each a list of parameters: (shape, "torch.float32", is_trained)."""

    world_size: int
    local_world_size: int
    device: str
    units: list[list[tuple[list[int], str, bool]]]


def trial_of_environment() -> Trial | None:
    """Raises ValueError where the variable holds something else."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        return Trial(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"[zeropg] {VARIABLE} is {text!r}, which is no trial of zeropg tune; unset it") from error


def end_after_sizes(model: nn.Module, units: Sequence[str] | None, group: dist.ProcessGroup, device: str) -> None:
    """In a trial without steps writes `Sizes` of a model that is not sharded yet, and raises SystemExit."""
    trial = trial_of_environment()
    if trial is None or trial.steps:
        return
    if group.rank() == 0:
        found = [
            [(list(parameter.shape), str(parameter.dtype), parameter.requires_grad) for _, parameter in unit.parameters]
            for unit in plan_units(model, units, None)
        ]
        local = int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))
        _write(trial, Sizes(group.size(), local, device, found))
    raise SystemExit(0)


class TrialRun(Observer):
    """Times updates, and raises SystemExit after the last one: on all ranks, in the engine's step()."""

    def __init__(self, trial: Trial, group: dist.ProcessGroup, clock: Clock) -> None:
        self._trial = trial
        self._group = group
        self._clock = clock
        self._seconds: list[float] = []
        self._start: float | None = None
        self._skipped = 0
        self._rows: int | None = None

    def begin(self, phase: Phase, inputs: Sequence[Any]) -> None:
        if self._start is None:
            self._start = self._clock.now()
        if phase == "forward":
            first = next((tensor for tensor in tensors_in(inputs) if tensor.dim()), None)
            self._rows = None if first is None else first.shape[0]

    def updated(self, facts: Facts) -> None:
        assert self._start is not None  # the step has begun
        now = self._clock.now()
        is_whole = facts.skipped == self._skipped
        if is_whole:
            self._seconds.append(now - self._start)
        self._start, self._skipped = now, facts.skipped
        if self._skipped > _MOST_SKIPPED:
            raise SystemExit(
                f"[zeropg] tune: {self._skipped} steps had gradients that are not finite; no speed is told"
            )
        if not is_whole or len(self._seconds) < self._trial.warm_up + self._trial.steps:
            return
        peaks: list[int] = [0] * self._group.size()
        dist.all_gather_object(peaks, _peak_bytes(), group=self._group)
        if self._group.rank() == 0:
            timed = self._seconds[self._trial.warm_up :]
            _write(self._trial, Report(timed, facts.samples, facts.micro_batch, self._rows, peaks))
        raise SystemExit(0)


def _peak_bytes() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write(trial: Trial, found: Report | Sizes) -> None:
    """Whole or not at all."""
    part = Path(f"{trial.report}.part")
    part.write_text(json.dumps(asdict(found)))
    part.replace(trial.report)
