"""From traces to one self-contained HTML page: a timeline of all ranks over a plot of memory. plotly draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeropg.tools.trace.read import ROOT, RankTrace

# kind: (row, colour); a rank has the rows in this order, from top to bottom.
_KINDS = {
    "forward": ("units", "#4c78a8"),
    "backward": ("units", "#f58518"),
    "step": ("units", "#54a24b"),
    "wait for gather": ("waiting", "#e45756"),
    "wait for reduce": ("waiting", "#b279a2"),
    "wait": ("waiting", "#9d755d"),
    "gather": ("gathers", "#72b7b2"),
    "reduce": ("reductions", "#eeca3b"),
}
_ROWS = ("model", "units", "waiting", "gathers", "reductions")


def write_page(traces: Sequence[RankTrace], title: str, path: Path) -> None:
    """Writes the page. Raises ImportError without plotly."""
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    rows = [row for row in _ROWS if any(_row(kind, unit) == row for kind, unit in _present(traces))]
    lanes = [_lane(trace, row) for trace in traces for row in rows]
    figure: Figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        row_heights=[0.72, 0.28],
        vertical_spacing=0.06,
        subplot_titles=["", f"memory of rank {_fullest(traces).rank}, MiB"],
    )
    for kind, (_, colour) in _KINDS.items():
        _add_bars(figure, traces, kind, colour)
    _add_memory(figure, _fullest(traces))
    for trace in traces[:1]:
        for end in trace.steps:
            figure.add_vline(x=end, line={"width": 1, "color": "#bbbbbb"})
    figure.update_layout(
        title=title,
        barmode="overlay",
        bargap=0.15,
        height=max(640, 22 * len(lanes) + 420),
        hovermode="closest",
        template="plotly_white",
        legend={"groupclick": "togglegroup"},
    )
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], row=1, col=1)
    figure.update_xaxes(title="ms", row=2, col=1)
    figure.write_html(path, include_plotlyjs=True)


def _present(traces: Sequence[RankTrace]) -> set[tuple[str, str]]:
    return {(event.kind, event.unit) for trace in traces for event in trace.events}


def _row(kind: str, unit: str) -> str:
    return "model" if unit == ROOT and kind in ("forward", "backward") else _KINDS[kind][0]


def _lane(trace: RankTrace, row: str) -> str:
    return f"rank {trace.rank} {row}"


def _add_bars(figure: Any, traces: Sequence[RankTrace], kind: str, colour: str) -> None:
    found = [(trace, event) for trace in traces for event in trace.events if event.kind == kind]
    if not found:
        return
    from plotly.graph_objects import Bar

    figure.add_trace(
        Bar(
            name=kind,
            orientation="h",
            y=[_lane(trace, _row(kind, event.unit)) for trace, event in found],
            base=[event.begin for _, event in found],
            x=[event.duration for _, event in found],
            marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
            opacity=0.85,
            customdata=[[event.unit, event.bytes / 2**20] for _, event in found],
            hovertemplate=f"{kind} %{{customdata[0]}}<br>%{{x:.3f}} ms, from %{{base:.3f}}"
            + ("<br>%{customdata[1]:.2f} MiB" if kind in ("gather", "reduce") else "")
            + "<extra>%{y}</extra>",
        ),
        row=1,
        col=1,
    )


def _fullest(traces: Sequence[RankTrace]) -> RankTrace:
    return max(traces, key=lambda trace: max((sum(s.bytes.values()) for s in trace.samples), default=0))


def _add_memory(figure: Any, trace: RankTrace) -> None:
    from plotly.graph_objects import Scatter

    for name in dict.fromkeys(name for sample in trace.samples for name in sample.bytes):
        held = [sample.bytes.get(name, 0) / 2**20 for sample in trace.samples]
        if any(held):
            figure.add_trace(
                Scatter(
                    name=name,
                    x=[sample.time for sample in trace.samples],
                    y=held,
                    stackgroup="memory",
                    line={"width": 0.5, "shape": "hv"},
                    hovertemplate=f"{name} %{{y:.2f}} MiB<extra></extra>",
                    legendgroup="memory",
                    legendgrouptitle={"text": "memory"},
                ),
                row=2,
                col=1,
            )
