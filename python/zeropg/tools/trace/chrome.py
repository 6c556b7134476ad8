"""From traces to the JSON that chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeropg.tools.trace.read import WAITS, RankTrace

_COMPUTE, _WAITING = 0, 1


def chrome_events(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """A process per rank: what it did, what it waited for, gathers and reductions that ran behind, memory."""
    events: list[dict[str, Any]] = []
    for trace in traces:
        common = {"pid": trace.rank}
        process = f"rank {trace.rank} ({trace.host})"
        events.append({"ph": "M", "name": "process_name", "args": {"name": process}} | common)
        for thread, name in ((_COMPUTE, "model"), (_WAITING, "waiting for other ranks")):
            events.append({"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}} | common)
        for number, event in enumerate(trace.events):
            named = {"name": f"{event.kind} {event.unit}".strip(), "cat": event.kind, "ts": 1e3 * event.begin} | common
            if event.kind in ("gather", "reduce"):  # several run at a time, which rows of spans cannot show
                identity = {"id": f"{trace.rank}.{number}", "tid": _COMPUTE}
                events.append(named | identity | {"ph": "b", "args": {"bytes": event.bytes}})
                events.append(named | identity | {"ph": "e", "ts": 1e3 * event.end})
            else:
                thread = _WAITING if event.kind in WAITS else _COMPUTE
                events.append(named | {"ph": "X", "dur": 1e3 * event.duration, "tid": thread})
        for sample in trace.samples:
            events.append({"ph": "C", "name": "memory", "ts": 1e3 * sample.time, "args": sample.bytes} | common)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
