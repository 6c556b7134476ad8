"""Draws what the suites measured, from the header and the rows of their files. matplotlib is asked for only here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropg.tools.bench.results import Row, Spread
from zeropg.tools.quantities import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0")  # readable on white and on black
_GRAY = "#808080"
_TICKS = 5  # on an axis of sizes; only they have a marker
_COLUMNS = 3  # of panels; as wide together as a README, so that letters keep their size there
_WIDTH, _LINES_HEIGHT, _BAR_HEIGHT = 9.6, 2.1, 0.24  # inches; of all panels, of one with lines, of a bar
# Letters stay text, and identifiers do not change from one drawing to the next: small files, small diffs.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "zeropg",
    "font.size": 8,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
}


def plot_collectives(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Size against bus bandwidth on log axes, one panel per operation and dtype, in place where there is that.

    Dashed, what the memory would allow: the lower bound of each row of the first peer.
    """
    rows = [row for row in rows if row.figures.get("bus_gbps")]
    peers = list(dict.fromkeys(row.peer for row in rows))
    kinds = list(dict.fromkeys((row.case, row.parameters["dtype"]) for row in rows))
    sizes = sorted({int(row.parameters["bytes"]) for row in rows})
    every = max(1, round(len(sizes) / _TICKS))
    figure, panels = _figure(len(kinds), _LINES_HEIGHT, same_axes=True)
    for (case, dtype), axes in zip(kinds, panels, strict=True):
        of_kind = [row for row in rows if (row.case, row.parameters["dtype"]) == (case, dtype)]
        of_kind = [row for row in of_kind if row.parameters["redop"] == of_kind[0].parameters["redop"]]
        for peer, color in zip(peers, _COLORS, strict=False):
            points = {row.parameters["bytes"]: row.median("bus_gbps") for row in of_kind if row.peer == peer}
            style: dict[str, Any] = {
                "marker": "o",
                "markersize": 4,
                "markeredgewidth": 0,
                "markevery": every,
                "linewidth": 1.2,
            }
            axes.plot(list(points), list(points.values()), color=color, label=peer, **style)
        bound = {row.parameters["bytes"]: _bound_gbps(row) for row in of_kind if row.peer == peers[0]}
        axes.plot(list(bound), list(bound.values()), color=_GRAY, linestyle="--", linewidth=1, label="memory's bound")
        axes.set_title(f"{case}, {dtype}", fontsize=9)
    for axes in panels[:1]:  # all panels have its axes
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes[::every], [size(each) for each in sizes[::every]])
        axes.yaxis.set_major_formatter("{x:g}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(peers) + 1, fontsize=9)
    for axes in panels:
        axes.minorticks_off()
    for axes in panels[::_COLUMNS]:
        axes.set_ylabel("bus bandwidth, GB/s", fontsize=9)
    for axes in panels[-_COLUMNS:]:
        axes.set_xlabel("size", fontsize=9)
        axes.tick_params(labelbottom=True)
    _save(figure, header, f"{header['ranks']} ranks", file)


def plot_groups(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars: milliseconds until a group works, the world's and a further one, per backend."""
    figure, (axes,) = _figure(1, _bars_height(len(rows)))
    _bars(axes, {f"{row.peer}, {row.case}": row.figures["time_ms"] for row in rows}, "ms", ours="zeropg")
    axes.set_title("time until a group works", fontsize=9)
    _save(figure, header, f"{header['ranks']} ranks", file)


def plot_train(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars: the step beside the baseline, CPU seconds beside the baseline, and bytes per parameter."""
    keys = {
        "step_over_ddp": ("step", "times DDP's over gloo"),
        "cpu_over_ddp": ("CPU seconds of a step", "times DDP's over gloo"),
        "memory_bytes_per_parameter": ("memory of a rank", "bytes per parameter"),
    }
    keys = {key: words for key, words in keys.items() if all(key in row.figures for row in rows)}
    figure, panels = _figure(len(keys), _bars_height(len(rows)))
    for (key, (title, unit)), axes in zip(keys.items(), panels, strict=True):
        _bars(axes, {row.peer: row.figures[key] for row in rows}, unit, ours="zeropg")
        axes.set_title(title, fontsize=9)
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)
    _save(figure, header, f"{header['ranks']} ranks", file)


def plot_load(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars: the time of a load, and what it holds beside the shard."""
    panels_of = {"time_ms": ("weights from files", "ms"), "above_shard_mib": ("memory beside the shard", "MiB")}
    figure, panels = _figure(len(panels_of), _bars_height(len(rows)))
    for (key, (title, unit)), axes in zip(panels_of.items(), panels, strict=True):
        _bars(axes, {row.peer: row.figures[key] for row in rows}, unit, ours="load_")
        axes.set_title(title, fontsize=9)
    panels[1].tick_params(labelleft=False)
    _save(figure, header, f"{header['ranks']} ranks, {header['bytes'] / 2**30:.3g} GiB", file)


def plot_deepspeed(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars: the step and the memory beside DeepSpeed's in the same case, where ratios are claimed."""
    keys = {"step_over_deepspeed": "step", "memory_over_deepspeed": "memory of a rank"}
    ours = [row for row in rows if all(key in row.figures for key in keys) and row.peer == "zeropg"]
    figure, panels = _figure(len(keys), _bars_height(len(ours)))
    for (key, title), axes in zip(keys.items(), panels, strict=True):
        _bars(axes, {row.case: row.figures[key] for row in ours}, "times DeepSpeed's", ours="stage")
        axes.axvline(1, color=_GRAY, linestyle="--", linewidth=1)
        axes.set_title(title, fontsize=9)
    panels[1].tick_params(labelleft=False)
    _save(figure, header, f"{header['ranks']} ranks, DeepSpeed {header['deepspeed']}", file)


def plot_optimizer(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars per dtype: bytes per second of each contestant, and what the memory allows as a line."""
    dtypes = list(dict.fromkeys(row.parameters["dtype"] for row in rows))
    figure, panels = _figure(len(dtypes), _bars_height(len(rows) // len(dtypes)))
    for dtype, axes in zip(dtypes, panels, strict=True):
        of_dtype = [row for row in rows if row.parameters["dtype"] == dtype]
        _bars(axes, {row.peer: row.figures["gbps"] for row in of_dtype}, "GB/s", ours="zeropg")
        axes.axvline(of_dtype[0].median("bound_gbps"), color=_GRAY, linestyle="--", linewidth=1, label="memory's bound")
        axes.set_title(f"{header['optimizer']}, {dtype} gradients", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9)
    _save(figure, header, f"{header['threads']} thread(s)", file)


def plot_offload(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars: bandwidth of the tier beside plain system calls, and the step with and without it."""
    figure, (left, right) = _figure(2, _bars_height(4))
    rates = {f"{row.peer}, {row.case}": row.figures["gbps"] for row in rows if row.case != "step"}
    _bars(left, rates, "GB/s", ours="zeropg")
    left.set_title("bandwidth", fontsize=9)
    _bars(right, {row.peer: row.figures["time_ms"] for row in rows if row.case == "step"}, "ms", ours="in the tier")
    right.set_title("optimizer step with its state", fontsize=9)
    _save(figure, header, header["tier"], file)


def plot_compression(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars per size: GB/s of floats that each codec encodes, with its residual, and decodes."""
    sizes = list(dict.fromkeys(int(row.parameters["bytes"]) for row in rows))
    keys = {"encode_with_residual_gbps": "encode, with residual", "decode_add_gbps": "decode and add"}
    count = len({row.case for row in rows})
    figure, panels = _figure(2 * len(sizes), _bars_height(count + 1), columns=2)
    for place, of_size in enumerate(sizes):
        for axes, (key, title) in zip(panels[2 * place :], keys.items(), strict=False):
            here = [row for row in rows if row.parameters["bytes"] == of_size]
            ours = [row for row in here if row.peer == "zeropg"]
            bars = {f"{row.case}, {row.median('percent_of_fp32'):.1f} %": row.figures[key] for row in ours}
            copies = [row.figures["copy_gbps"] for row in here if row.peer == "copy"]
            _bars(axes, bars | {"copy": copies[0]}, "GB/s of floats", ours=tuple(bars))
            axes.set_title(f"{title}, {size(of_size)}", fontsize=9)
    _save(figure, header, "one core", file)


def plot_loss(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Validation loss against seconds and against megabytes sent, a line per arm; a row of panels per task and link."""
    from matplotlib.ticker import LogLocator

    points = [row for row in rows if "step" in row.parameters]
    cases = list(dict.fromkeys((row.case, row.parameters["link"]) for row in points))
    arms = list(dict.fromkeys(row.peer for row in points))
    figure, panels = _figure(2 * len(cases), 2 * _LINES_HEIGHT, columns=2)
    for place, (case, link) in enumerate(cases):
        for axes, key, unit in zip(panels[2 * place :], ("elapsed_s", "sent_mb"), ("seconds", "MB sent"), strict=False):
            for number, arm in enumerate(arms):
                of_arm = [row for row in points if (row.case, row.parameters["link"], row.peer) == (case, link, arm)]
                axes.plot(
                    [row.median(key) for row in of_arm],
                    [row.median("loss") for row in of_arm],
                    label=arm,
                    color=f"C{number % 10}",
                    linestyle=("-", "--", ":")[number // 10 % 3],
                    linewidth=1.2,
                )
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
            axes.set_xlabel(unit)
            axes.set_ylabel("validation loss")
            axes.set_title(f"{case}, {link}", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    _save(figure, header, f"{header['hosts']} hosts, {header['ranks']} ranks", file)


def plot_nodes(header: dict[str, Any], rows: list[Row], file: Path) -> None:
    """Bars: the share of the links' bound, and how many times gloo's speed; curves: operations while a link changes."""
    whole = [row for row in rows if "number" not in row.parameters]
    panels = {}
    for key, title, unit in (
        ("percent_of_bound", "share of what the links allow", "%"),
        ("faster_than_gloo", "speed", "times gloo's"),
        ("cpu_over_gloo", "CPU seconds", "times gloo's"),
    ):
        bars = {_point_of(row): row.figures[key] for row in whole if key in row.figures}
        if bars:
            panels[key] = (bars, title, unit)
    curves = [row for row in rows if "number" in row.parameters]
    height = _bars_height(max((len(bars) for bars, _, _ in panels.values()), default=4))
    figure, drawn = _figure(len(panels) + bool(curves), height, columns=2)
    for axes, (bars, title, unit) in zip(drawn, panels.values(), strict=False):
        _bars(axes, bars, unit, ours="zeropg")
        axes.set_title(title, fontsize=9)
    if curves:
        _draw_changes(drawn[-1], curves, next(row for row in whole if "dropped_bound_ms" in row.figures))
    _save(figure, header, f"{header['rounds']} rounds", file)


def _draw_changes(axes: Axes, curves: list[Row], whole: Row) -> None:
    """The time of each operation while a link changes after each third of them; dashed, the bounds of its rates."""
    for peer, color in zip(dict.fromkeys(row.peer for row in curves), _COLORS, strict=False):
        times = [row.median("time_ms") for row in curves if row.peer == peer]
        axes.plot(times, color=color, linewidth=1.2, label=peer)
    bounds = [whole.median(key) for key in ("bound_ms", "dropped_bound_ms", "bound_ms") for _ in range(len(times) // 3)]
    axes.plot(bounds, color=_GRAY, linestyle="--", linewidth=1, drawstyle="steps-mid", label="links' bound")
    axes.set_title(f"{whole.parameters['operation']} while a link changes ({whole.case})", fontsize=9)
    axes.set_xlabel("operation")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _point_of(row: Row) -> str:
    return f"{row.peer}, {row.case} {row.parameters['operation']} {size(int(row.parameters['bytes']))}"


def _bound_gbps(row: Row) -> float:
    """The bus bandwidth at the lower bound; not a number, which is not drawn, where there is no bound."""
    percent = row.median("percent_of_bound")
    return 100 * row.median("bus_gbps") / percent if percent > 0 else float("nan")


def _bars(axes: Axes, bars: dict[str, Spread | float], unit: str, *, ours: str | tuple[str, ...]) -> None:
    """Lying bars from the top down, with their spread and the median in digits; those that `ours` begins are blue."""
    names = list(bars)
    spreads = [value if isinstance(value, Spread) else Spread(value, value, value) for value in bars.values()]
    drawn = axes.barh(
        range(len(names)),
        [spread.median for spread in spreads],
        color=[_COLORS[0] if name.startswith(ours) else _COLORS[1] for name in names],
        xerr=[[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]],
        error_kw={"elinewidth": 1, "ecolor": "#202020"},
    )
    numbers = [f"{spread.median:#.3g}".rstrip(".") for spread in spreads]
    axes.bar_label(drawn, numbers, padding=3, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.margins(x=0.2)  # for the numbers
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)


def _bars_height(count: int) -> float:
    return 0.9 + _BAR_HEIGHT * count


def _figure(
    count: int, panel_height: float, *, columns: int = _COLUMNS, same_axes: bool = False
) -> tuple[Figure, list[Axes]]:
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    columns = min(columns, max(1, count))
    rows = -(-max(1, count) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, panel_height * rows + 0.7), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=same_axes, sharey=same_axes)
    flat = list(panels.flat)
    for axes in flat:
        axes.grid(alpha=0.3)
        axes.tick_params(length=0)  # the grid shows where they are
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for spare in flat[count:]:
        spare.set_visible(False)
    return figure, flat[:count]


def _save(figure: Figure, header: dict[str, Any], what: str, file: Path) -> None:
    import matplotlib

    words = [what, header["cpu"], f"torch {header['torch']}", f"commit {header['commit']}", header["time"]]
    mark = "BUSY MACHINE, PROVES NOTHING: " if header["busy"] else ""
    figure.suptitle(mark + ", ".join(word for word in words if word), fontsize=9, color="red" if mark else "black")
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    if file.suffix == ".svg":
        file.write_text(_shorter(file.read_text()))


def _shorter(svg: str) -> str:
    """The same drawing in two thirds of the bytes: a hundredth of a point is enough."""
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), svg)
    for spare in (r' transform="rotate\(-0 [^"]*\)"', r"^\s+", r'<g id="[^"]*"/>\n'):
        svg = re.sub(spare, "", svg, flags=re.MULTILINE)
    return svg
