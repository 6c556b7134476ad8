"""What a sharded model did when, one file per rank: the recording half of `python -m zeropg trace`."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import platform
import re
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeropg._native import _C

FORMAT = "zeropg trace 1"
_DEFAULT_STEPS = "3-6"  # the first ones allocate, and learn the order of units
_NUMBERS = itertools.count()  # of the models of this process


@dataclass(frozen=True)
class TraceRequest:
    """Where to write the steps from `first` to `last`, both with it and counted from 1."""

    directory: Path
    first: int
    last: int


def requested_trace() -> TraceRequest | None:
    """What ZEROPG_TRACE, a directory, and ZEROPG_TRACE_STEPS, such as "3-6", ask for; None: nothing.

    Raises ValueError for steps that are none.
    """
    directory = os.environ.get("ZEROPG_TRACE")
    if not directory:
        return None
    steps = os.environ.get("ZEROPG_TRACE_STEPS", _DEFAULT_STEPS)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"[zeropg] fully_shard: ZEROPG_TRACE_STEPS is {steps!r}; expected one step or a range of them, counted "
            'from 1, such as "3-6".'
        )
    return TraceRequest(Path(directory), first, last)


class TraceRecorder:
    """Records some steps of one model, and writes them when the last has ended, or the model or the program does."""

    def __init__(self, core: _C.ShardedModule, request: TraceRequest) -> None:
        self._core = core
        self._directory = request.directory
        self._first = request.first
        self._last = request.last
        self._number = next(_NUMBERS)
        # In the world: models over several groups have ranks of the same numbers.
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._is_on = False
        self._finish_at_exit = weakref.WeakMethod(self.finish)
        atexit.register(_call, self._finish_at_exit)

    def next_forward(self) -> bool:
        """Called before each forward of the whole model. Returns whether there is still something to record."""
        done = self._core.steps
        if not self._is_on and done == self._first - 1:
            self._is_on = True
            self._core.start_log()
        if done >= self._last:
            self.finish()
            return False
        return True

    def __del__(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Writes what was recorded, once."""
        if not self._is_on:
            return
        self._is_on = False
        events, samples = self._core.stop_log()
        core = self._core
        trace: dict[str, Any] = {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "host": platform.node(),
            "stage": core.stage,
            "fetch": core.fetch_name,
            "first_step": self._first,
            "epoch_ns": time.time_ns() - time.monotonic_ns(),  # what the times count from
            "events": events,
            "samples": samples,
        }
        path = self._directory / f"rank{self._rank}.model{self._number}.json"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(trace))
            temporary.replace(path)
        except OSError as error:  # a run does not end because nobody can look at it
            print(f"[zeropg rank {core.rank}/{core.world_size}] trace: not written: {error}", file=sys.stderr)
            return
        if core.rank == 0:
            print(
                f"[zeropg] trace: {path} and those of the other ranks; python -m zeropg trace {self._directory}",
                file=sys.stderr,
                flush=True,
            )


def _call(finish: weakref.WeakMethod[Any]) -> None:
    if (method := finish()) is not None:
        method()
