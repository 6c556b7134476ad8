"""Draws what `python -m zeropg simulate` computed. matplotlib is asked for only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeropg.tools.quantities import size


def plot_comparison(tables: list[dict[str, Any]], title: str, file: Path) -> None:
    """Size against time on log axes, a line per algorithm, the links' lower bound dashed; for one size, bars."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = figure.subplots()
    names = dict.fromkeys(result["algorithm"] for table in tables for result in table["algorithms"])
    times = {
        name: {
            table["size_bytes"]: result["time_us"] / 1000
            for table in tables
            for result in table["algorithms"]
            if result["algorithm"] == name
        }
        for name in names
    }
    if len(tables) == 1:
        axes.barh(list(times), [next(iter(points.values())) for points in times.values()])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
    else:
        for name, points in times.items():
            axes.plot(list(points), list(points.values()), marker="o", markersize=4, label=name)
        bounds = {table["size_bytes"]: table["bound_us"] for table in tables if table["bound_us"]}
        if bounds:
            milliseconds = [bound / 1000 for bound in bounds.values()]
            axes.plot(list(bounds), milliseconds, color="#808080", linestyle="--", label="lower bound of the links")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([table["size_bytes"] for table in tables], [size(table["size_bytes"]) for table in tables])
        axes.set_xlabel("size")
        axes.set_ylabel("ms")
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    axes.set_title(f"{tables[0]['operation']}, simulated: {title}", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
