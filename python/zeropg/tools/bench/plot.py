"""Draws what the suites measured. matplotlib is asked for only here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0")  # readable on white and on black


def plot_collectives(document: dict[str, Any], file: Path) -> None:
    """Size against bus bandwidth on log axes, one panel per operation, the first dtype and reduction of each.

    Dashed, what the memory would allow: the lower bound of each row.
    """
    peers = {document["backend"]: document["results"]} | {
        name: peer["results"] for name, peer in document["peers"].items()
    }
    operations = [name for name in _operations(document["results"]) if name != "barrier"]
    figure, panels = _figure(len(operations))
    for name, axes in zip(operations, panels, strict=True):
        for (peer, rows), color in zip(peers.items(), _COLORS, strict=False):
            points = _points(rows, name)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=peer)
        bound = _bound(document["results"], name)
        if bound:
            axes.plot(*zip(*bound, strict=True), color="gray", linestyle="--", linewidth=1, label="bound")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("bytes")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, document["header"], f"{document['config']['ranks']} ranks", file)


def plot_groups(document: dict[str, Any], file: Path) -> None:
    """Bars: milliseconds until a group works, the world's and a further one, per backend."""
    table = document["table"]
    names = list(table)[::-1]
    figure, (axes,) = _figure(1)
    colors = [_COLORS[0] if name.startswith("zeropg") else _COLORS[1] for name in names]
    axes.barh(names, [table[name]["ms"] for name in names], color=colors)
    axes.set_title("ms until a group works", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, document["header"], f"{document['header']['ranks']} ranks", file)


def plot_train(document: dict[str, Any], file: Path) -> None:
    """Bars: the step beside the baseline, CPU seconds beside the baseline, and bytes per parameter."""
    table = document["table"]
    names = list(table)
    figure, panels = _figure(3)
    for key, title, axes in zip(
        ("step_over_ddp", "cpu_over_ddp", "memory_bytes_per_parameter"),
        ("step, DDP over gloo = 1", "CPU seconds, DDP over gloo = 1", "bytes per parameter and rank"),
        panels,
        strict=True,
    ):
        values = [table[name][key] for name in names]
        heights = [value["median"] if isinstance(value, dict) else value or 0.0 for value in values]
        colors = [_COLORS[0] if name.startswith("zeropg") else _COLORS[1] for name in names]
        axes.barh(names[::-1], heights[::-1], color=colors[::-1])
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    _save(figure, document["header"], f"{document['header']['ranks']} ranks", file)


def plot_optimizer(document: dict[str, Any], file: Path) -> None:
    """Bars per dtype: bytes per second of each contestant, and what the memory allows as a line."""
    figure, panels = _figure(len(document["tables"]))
    for (dtype, rows), axes in zip(document["tables"].items(), panels, strict=True):
        names = list(rows)[::-1]
        colors = [_COLORS[0] if name.startswith("zeropg") else _COLORS[1] for name in names]
        axes.barh(names, [rows[name]["gbps"] for name in names], color=colors)
        axes.axvline(next(iter(rows.values()))["bound_gbps"], color="gray", linestyle="--", label="memory bound")
        axes.set_title(f"{document['header']['optimizer']}, {dtype}", fontsize=10)
        axes.set_xlabel("GB/s")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, document["header"], f"{document['header']['threads']} threads", file)


def plot_offload(document: dict[str, Any], file: Path) -> None:
    """Bars: bandwidth of the tier beside plain system calls, and the step with and without it."""
    figure, (left, right) = _figure(2)
    names = list(document["bandwidth"])
    for offset, key, color in ((-0.2, "write_gbps", _COLORS[0]), (0.2, "read_gbps", _COLORS[1])):
        heights = [document["bandwidth"][name][key] for name in names]
        left.bar([place + offset for place in range(len(names))], heights, width=0.4, color=color, label=key[:-5])
    left.set_xticks(range(len(names)), names)
    left.set_title("GB/s", fontsize=10)
    left.legend(fontsize=8)
    right.barh(["in the tier", "in memory"], [document["step"][key] for key in ("tier_ms", "memory_ms")])
    right.set_title("optimizer step, ms", fontsize=10)
    _save(figure, document["header"], document["header"]["tier"], file)


def plot_compression(document: dict[str, Any], file: Path) -> None:
    """Bars per codec: GB/s of floats, encoded, decoded, and in torch's operations."""
    names = list(document["table"])
    figure, panels = _figure(len(names))
    keys = ("copy_gbps", "torch_encode_gbps", "decode_gbps", "encode_with_residual_gbps", "encode_gbps")
    for name, axes in zip(names, panels, strict=True):
        row = {key: value for key, value in document["table"][name].items() if value is not None}
        heights = {key[:-5].replace("_", " "): row[key] for key in keys if key in row}
        axes.barh(list(heights), list(heights.values()), color=_COLORS[0])
        axes.set_title(f"{name}: GB/s, {row['percent_of_fp32']:.1f} % of the bytes", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    _save(figure, document["header"], "one core", file)


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    columns = min(3, max(1, count))
    rows = -(-max(1, count) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    flat = list(panels.flat)
    for spare in flat[count:]:
        spare.set_visible(False)
    return figure, flat[:count]


def _save(figure: Figure, header: dict[str, Any], what: str, file: Path) -> None:
    words = [what, header["cpu"], f"torch {header['torch']}", f"commit {header['commit']}", header["time"]]
    mark = "BUSY MACHINE, PROVES NOTHING: " if header["busy"] else ""
    figure.suptitle(mark + ", ".join(word for word in words if word), fontsize=8, color="red" if mark else "black")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _operations(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["experiment_name"] for row in rows))


def _points(rows: list[dict[str, Any]], operation: str) -> list[tuple[int, float]]:
    """(bytes, bus bandwidth) of an operation: its first dtype and reduction, in place where there is that."""
    return [(size, timing["bus_bw"]) for size, timing, _ in _timings(rows, operation)]


def _bound(rows: list[dict[str, Any]], operation: str) -> list[tuple[int, float]]:
    """(bytes, bus bandwidth at the lower bound), where there is one."""
    shares = (
        (size, timing["bus_bw"], details["percent_of_bound"]) for size, timing, details in _timings(rows, operation)
    )
    return [(size, 100 * bandwidth / percent) for size, bandwidth, percent in shares if percent > 0]


def _timings(rows: list[dict[str, Any]], operation: str) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    rows = [row for row in rows if row["experiment_name"] == operation]
    for row in rows:
        place = "in_place" if row["in_place"] else "out_of_place"
        is_first_kind = (row["type"], row["redop"]) == (rows[0]["type"], rows[0]["redop"])
        if is_first_kind and row[place] and row[place]["bus_bw"] > 0:
            yield row["size"], row[place], row[f"{place}_per_iter"]
