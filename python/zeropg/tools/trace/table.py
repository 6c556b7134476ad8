"""From traces to the table of `python -m zeropg trace`: where a step's time goes, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeropg.tools.quantities import size
from zeropg.tools.trace.read import ROOT, WAITS, Event, RankTrace

_COLUMNS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "gather": ("gather",),
    "waited": ("wait for gather",),
    "reduce": ("reduce",),
    "waited ": ("wait for reduce",),
}


def lines_of(traces: Sequence[RankTrace]) -> list[str]:
    """The table and its totals, milliseconds per step. Units in the order of the forward, the whole model first."""
    first = traces[0]
    names = list(dict.fromkeys(event.unit for event in first.events if event.kind == "forward"))
    names = [ROOT, *(name for name in names if name != ROOT)]
    width = max(map(len, [*names, "unit"]))
    lines = [
        f"stage {first.stage}, {first.fetch}, {first.world_size} ranks, {_steps(first)}; ms per step, mean of ranks",
        f"{'unit':{width}}" + "".join(f"{name:>10}" for name in _COLUMNS),
    ]
    for name in names:
        cells = (_per_step(traces, kinds, name) for kinds in _COLUMNS.values())
        lines.append(f"{name:{width}}" + "".join(f"{cell:10.2f}" if cell else f"{'-':>10}" for cell in cells))
    return [*lines, "", *_totals(traces), "", *_memory(traces)]


def _steps(trace: RankTrace) -> str:
    count = max(1, len(trace.steps))
    last = trace.first_step + count - 1
    return f"step {last}" if count == 1 else f"steps {trace.first_step} to {last}"


def _per_step(traces: Sequence[RankTrace], kinds: Iterable[str], unit: str | None = None) -> float:
    return sum(_of_rank(trace, kinds, unit) for trace in traces) / len(traces)


def _of_rank(trace: RankTrace, kinds: Iterable[str], unit: str | None = None) -> float:
    kinds = tuple(kinds)
    events = (event for event in trace.events if event.kind in kinds and unit in (None, event.unit))
    return sum(event.duration for event in events) / max(1, len(trace.steps))


def _totals(traces: Sequence[RankTrace]) -> list[str]:
    step = sum(trace.milliseconds / max(1, len(trace.steps)) for trace in traces) / len(traces)
    rows = {
        "forward": _per_step(traces, ["forward"], ROOT),
        "backward": _per_step(traces, ["backward"], ROOT),
        "optimizer step": _per_step(traces, ["step"]),
    }
    waits = [_of_rank(trace, WAITS) for trace in traces]
    lines = [f"a step takes {step:.2f} ms"]
    lines += [f"  {name:<42}{value:10.2f} {value / step:6.1%}" for name, value in rows.items()]
    mean = sum(waits) / len(waits)
    lines.append(f"  {'waiting for other ranks, within these':<42}{mean:10.2f} {mean / step:6.1%}")
    if len(waits) > 1:
        least, most = min(waits), max(waits)
        lines.append(f"    rank {waits.index(most)} {most:.2f}, rank {waits.index(least)} {least:.2f}")
    moved = {kind: _bytes(traces, kind) for kind in ("gather", "reduce")}
    if any(moved.values()):
        lines.append("  moved per step and rank: " + ", ".join(f"{size(b)} to {kind}" for kind, b in moved.items()))
    return lines


def _bytes(traces: Sequence[RankTrace], kind: str) -> int:
    events: list[Event] = [event for trace in traces for event in trace.events if event.kind == kind]
    return int(sum(event.bytes for event in events) / len(traces) / max(1, len(traces[0].steps)))


def _memory(traces: Sequence[RankTrace]) -> list[str]:
    peak, trace, sample = max(
        ((sum(sample.bytes.values()), trace, sample) for trace in traces for sample in trace.samples),
        key=lambda found: found[0],
        default=(0, None, None),
    )
    if trace is None or sample is None:
        return []
    classes = ", ".join(f"{name} {size(held)}" for name, held in sample.bytes.items() if held)
    return [f"memory at its peak, rank {trace.rank}: {size(peak)} ({classes}), without optimizer state and activations"]
