"""`python -m zeropg bench table`: what the files of `make bench` say, as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropg.tools.bench.results import Row, read_results
from zeropg.tools.command_line import make_parser
from zeropg.tools.quantities import size

_Files = dict[str, tuple[dict[str, Any], list[Row]]]

_DESCRIPTION = """
Reads the files that the suites wrote into a folder, and prints them as Markdown. For each operation it says how many
times as fast as gloo it is (the median of the rounds; over a range of sizes the least and the largest median). For the
largest size it gives the share of the lower bound, and how many times as long as a copy by all ranks it takes. For
nodes it has a line per case and size. Files that are missing are left out.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench table                               the files in benchmarks/results
  python -m zeropg bench table --folder /tmp/mine

status: 0 printed; 2 wrong options or no file
"""
_BASELINE = "gloo"
_FASTER = f"faster_than_{_BASELINE}"
_TENSORS = {"zeropg": "ordinary", "zeropg_arena": "shared"}
_SMALL, _MIDDLE = 64 << 10, 4 << 20  # the last sizes of the first and of the second column
_COLUMNS = ("to 64 KiB", "to 4 MiB", "above")
_OF_NODES = {
    "percent_of_bound": "% of the bound",
    "faster_than_gloo": "x gloo",
    "cpu_over_gloo": "of gloo's CPU seconds",
    "percent_of_undisturbed": "% of the undisturbed rate",
    "dropped_over_bound": "x the bound once dropped",
    "restored_over_bound": "x the bound once back",
}


def main(arguments: list[str]) -> int:
    """Print what the folder has; returns the exit status. One process."""
    parser = make_parser("bench table", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder with the JSON files (default benchmarks/results)",
    )
    folder: Path = parser.parse_args(arguments).folder
    try:
        files = {file.stem: read_results(file) for file in sorted(folder.glob("*.json"))}
    except ValueError as error:
        print(f"zeropg bench: {error}", file=sys.stderr)
        return 2
    lines = [*_collectives(files), *_dtypes(files), *_latency(files), *_groups(files), *_nodes(files)]
    if not lines:
        print(f"zeropg bench: '{folder}' has no file of collectives, groups or nodes; run make bench", file=sys.stderr)
        return 2
    busy = [name for name, (header, _) in files.items() if header["busy"]]
    if busy:
        lines += ["", f"Measured while others used the CPUs, so proving nothing: {', '.join(busy)}."]
    print("\n".join(lines))
    return 0


def _collectives(files: _Files) -> Iterator[str]:
    lines = []
    for header, rows in _named(files, "collectives_"):
        for operation in dict.fromkeys(row.case for row in rows):
            for peer, tensors in _TENSORS.items():
                cells = _cells(rows, operation, peer)
                if cells:
                    lines.append(f"| {header['ranks']} | {operation} | {tensors} | " + " | ".join(cells) + " |")
    if lines:
        heads = ("ranks", "operation", "tensors", *_COLUMNS, "% of the bound", "x copy", "p99 below gloo's p50")
        yield "| " + " | ".join(heads) + " |"
        yield "|---" * len(heads) + "|"
        yield from lines


def _cells(rows: list[Row], operation: str, peer: str) -> list[str]:
    baseline = _points(rows, _BASELINE, operation)
    ours = {point: row for point, row in _points(rows, peer, operation).items() if _FASTER in row.figures}
    if not ours:
        return []
    faster: list[list[float]] = [[], [], []]
    below = []
    for point, row in ours.items():
        count = int(row.parameters["bytes"])
        faster[(count > _SMALL) + (count > _MIDDLE)].append(row.median(_FASTER))
        below.append(row.median("p99_us") < baseline[point].median("time_us"))
    ranges = [f"{min(values):.1f}-{max(values):.1f}" if values else "" for values in faster]
    largest = list(ours.values())[-1]
    shares = (f"{largest.median('percent_of_bound'):.0f}", f"{largest.median('times_copy'):.2f}")
    return [*ranges, *shares, f"{sum(below)} of {len(below)} sizes"]


def _dtypes(files: _Files) -> Iterator[str]:
    """The rate of bfloat16 beside that of float, in bytes."""
    for header, rows in _named(files, "dtypes_"):
        for peer, tensors in _TENSORS.items():
            halves = [
                row for row in _points(rows, peer, "all_reduce").values() if row.parameters["dtype"] == "bfloat16"
            ]
            shares = [row.median("faster_than_float") for row in halves if "faster_than_float" in row.figures]
            if shares:
                yield ""
                yield (
                    f"all_reduce of bfloat16, {tensors} tensors, {header['ranks']} ranks: "
                    f"{min(shares):.2f}-{max(shares):.2f} of float's rate in bytes."
                )


def _latency(files: _Files) -> Iterator[str]:
    for header, rows in (*_named(files, "latency_"), *_named(files, "busy_")):
        company = f" beside {header['beside']} busy processes" if header["beside"] else ""
        for operation in dict.fromkeys(row.case for row in rows):
            baseline = _points(rows, _BASELINE, operation)
            for point, row in _points(rows, "zeropg", operation).items():
                gloo = f", gloo {baseline[point].median('time_us'):.1f} us" if point in baseline else ""
                yield ""
                yield (
                    f"{operation} of {row.parameters['bytes']} bytes, {header['ranks']} rank(s){company}: "
                    f"{row.median('time_us'):.1f} us (p99 {row.median('p99_us'):.1f}){gloo}."
                )


def _groups(files: _Files) -> Iterator[str]:
    for header, rows in _named(files, "groups_"):
        for row in rows:
            time_ms = row.median("time_ms")
            yield ""
            yield (
                f"{row.peer} {row.case} group of {header['ranks']} ranks: {time_ms:.1f} ms, "
                f"{time_ms / header['ranks']:.2f} ms per rank."
            )


def _nodes(files: _Files) -> Iterator[str]:
    """A line per case and point, its shares and ratios; cells whose figure the point does not have are empty."""
    for _, rows in _named(files, "nodes"):
        ours = [row for row in rows if row.peer == "zeropg" and "number" not in row.parameters]
        columns = {key: head for key, head in _OF_NODES.items() if any(key in row.figures for row in ours)}
        heads = ("nodes", "operation", "size", *columns.values())
        yield from ("", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|")
        for row in ours:
            cells = (f"{row.median(key):.3g}" if key in row.figures else "" for key in columns)
            point = (row.parameters["what"], row.parameters["operation"], size(int(row.parameters["bytes"])))
            yield "| " + " | ".join((*map(str, point), *cells)) + " |"


def _named(files: _Files, start: str) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    return (file for name, file in files.items() if name.startswith(start))


def _points(rows: list[Row], peer: str, operation: str) -> dict[tuple[Any, ...], Row]:
    """What was timed, by dtype, reduction and size: in place, which stands behind out of place, where there is that."""
    timed = (row for row in rows if (row.peer, row.case) == (peer, operation) and "time_us" in row.figures)
    return {tuple(row.parameters[key] for key in ("dtype", "redop", "bytes")): row for row in timed}
