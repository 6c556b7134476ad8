"""Reads the files that ZEROPG_TRACE makes (`zeropg.sharding.trace`): from JSON to events in milliseconds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropg.sharding.trace import FORMAT

ROOT = "(whole model)"
WAITS = ("wait for gather", "wait for reduce", "wait")
KINDS = ("forward", "backward", "step", *WAITS, "gather", "reduce")


class TraceError(ValueError):
    """A folder of traces that cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Event:
    """Something that a rank did, or waited for. kind: of KINDS. Milliseconds since the first event of any rank."""

    kind: str
    unit: str
    begin: float
    end: float
    bytes: int

    @property
    def duration(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Sample:
    """What a rank held in memory. bytes: by class, as memory_report() names them."""

    time: float
    bytes: dict[str, int]


@dataclass(frozen=True)
class RankTrace:
    """All that one rank recorded of one model. steps: the end of each, in milliseconds."""

    rank: int
    world_size: int
    host: str
    stage: int
    fetch: str
    first_step: int
    events: list[Event]
    samples: list[Sample]

    @property
    def steps(self) -> list[float]:
        return [event.end for event in self.events if event.kind == "step"]

    @property
    def milliseconds(self) -> float:
        """From the first event to the end of the last step, or of the last event where no step ended."""
        return (self.steps or [max(event.end for event in self.events)])[-1] - self.events[0].begin


def models_in(directory: Path) -> list[int]:
    """The numbers of the models that have files there, in the order in which the program made them."""
    names = (re.fullmatch(r"rank\d+\.model(\d+)\.json", path.name) for path in directory.glob("rank*.json"))
    return sorted({int(name[1]) for name in names if name})


def read_traces(directory: Path, model: int) -> list[RankTrace]:
    """Returns what each rank recorded, in their order; on some ranks there may be nothing. Raises TraceError."""
    found = [(path, _load(path)) for path in sorted(directory.glob(f"rank*.model{model}.json"))]
    found = [(path, trace) for path, trace in found if trace["events"]]
    if not found:
        raise TraceError(f"{directory} has no events; let the program take the steps that ZEROPG_TRACE_STEPS names")
    sizes = {trace["world_size"] for _, trace in found}
    if len(sizes) > 1:
        raise TraceError(f"{directory} has files of runs with {sorted(sizes)} ranks; give each run a folder of its own")
    zero = min(trace["epoch_ns"] + event[2] for _, trace in found for event in trace["events"])
    return sorted((_trace(trace, zero) for _, trace in found), key=lambda trace: trace.rank)


def _load(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text())
        is_known = trace["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace ({type(error).__name__}: {error}); record it again") from error
    if not is_known:
        raise TraceError(f"{path} is a {trace['format']!r}, expected {FORMAT!r}; use the zeropg that recorded it")
    assert isinstance(trace, dict)
    return trace


def _trace(trace: dict[str, Any], zero: int) -> RankTrace:
    offset: int = trace["epoch_ns"] - zero

    def milliseconds(time: int) -> float:
        return (offset + time) / 1e6

    events = [
        Event(kind, unit or ("" if kind in ("step", "wait") else ROOT), milliseconds(begin), milliseconds(end), size)
        for kind, unit, begin, end, size in trace["events"]
    ]
    return RankTrace(
        rank=trace["rank"],
        world_size=trace["world_size"],
        host=trace["host"],
        stage=trace["stage"],
        fetch=trace["fetch"],
        first_step=trace["first_step"],
        events=sorted(events, key=lambda event: event.begin),
        samples=[Sample(milliseconds(time), sizes) for time, sizes in trace["samples"]],
    )
