"""`python -m zeropg bench table`: what the files of `make bench` say, as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropg.tools.bench import harness

_DESCRIPTION = """
Reads the files that the suites wrote into a folder, and prints them as Markdown. For each operation it says how many
times as fast as gloo it is (the median of the rounds; over a range of sizes the least and the largest median). For the
largest size it gives the share of the lower bound, and how many times as long as a copy by all ranks it takes. Files
that are missing are left out.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench table                               the files in benchmarks/results
  python -m zeropg bench table --folder /tmp/mine

status: 0 printed; 2 wrong options or no file
"""
_BASELINE = "gloo"
_TENSORS = {"zeropg": "ordinary", "zeropg_arena": "shared"}
_SMALL, _MIDDLE = 64 << 10, 4 << 20  # the last sizes of the first and of the second column
_COLUMNS = ("to 64 KiB", "to 4 MiB", "above")


def main(arguments: list[str]) -> int:
    """Print what the folder has; returns the exit status. One process."""
    parser = argparse.ArgumentParser(
        prog="python -m zeropg bench table",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder with the JSON files (default benchmarks/results)",
    )
    folder: Path = parser.parse_args(arguments).folder
    documents = {file.stem: harness.read_json(file) for file in sorted(folder.glob("*.json"))}
    lines = [*_collectives(documents), *_dtypes(documents), *_latency(documents), *_groups(documents)]
    if not lines:
        print(f"zeropg bench: '{folder}' has no file of collectives or groups; run make bench", file=sys.stderr)
        return 2
    busy = [name for name, document in documents.items() if document["header"].get("busy")]
    if busy:
        lines += ["", f"Measured while others used the CPUs, so proving nothing: {', '.join(busy)}."]
    print("\n".join(lines))
    return 0


def _collectives(documents: dict[str, Any]) -> Iterator[str]:
    lines = []
    for document in _named(documents, "collectives_"):
        if _BASELINE not in document["peers"]:
            continue
        for operation in dict.fromkeys(row["experiment_name"] for row in document["results"]):
            for peer, tensors in _TENSORS.items():
                cells = _cells(document, operation, peer)
                if cells:
                    ranks = document["config"]["ranks"]
                    lines.append(f"| {ranks} | {operation} | {tensors} | " + " | ".join(cells) + " |")
    if lines:
        heads = ("ranks", "operation", "tensors", *_COLUMNS, "% of the bound", "x copy", "p99 below gloo's p50")
        yield "| " + " | ".join(heads) + " |"
        yield "|---" * len(heads) + "|"
        yield from lines


def _cells(document: dict[str, Any], operation: str, peer: str) -> list[str]:
    baseline = {row["size"]: row for row in _rows(document, _BASELINE, operation)}
    faster: list[list[float]] = [[], [], []]
    below, details = [], None
    for row in _rows(document, peer, operation):
        ours, theirs = _details(row), _details(baseline.get(row["size"]))
        if ours is None or theirs is None:
            continue
        ratio = harness.ratios(theirs["round_medians_us"], ours["round_medians_us"]).median
        faster[(row["size"] > _SMALL) + (row["size"] > _MIDDLE)].append(ratio)
        below.append(ours["p99_us"] < theirs["p50_us"])
        details = ours
    if details is None:
        return []
    ranges = [f"{min(values):.1f}-{max(values):.1f}" if values else "" for values in faster]
    bound = f"{details['percent_of_bound']:.0f}"
    return [*ranges, bound, f"{details['times_copy']:.2f}", f"{sum(below)} of {len(below)} sizes"]


def _dtypes(documents: dict[str, Any]) -> Iterator[str]:
    """The rate of bfloat16 beside that of float, in bytes."""
    for document in _named(documents, "dtypes_"):
        for peer, tensors in _TENSORS.items():
            rounds: dict[str, dict[int, list[float]]] = {"float": {}, "bfloat16": {}}
            for row in _rows(document, peer, "all_reduce"):
                details = _details(row)
                if details and row["type"] in rounds:
                    rounds[row["type"]][row["size"]] = details["round_medians_us"]
            floats = rounds["float"]
            shares = [
                harness.ratios(floats[size], medians).median
                for size, medians in rounds["bfloat16"].items()
                if size in floats
            ]
            if shares:
                yield ""
                yield (
                    f"all_reduce of bfloat16, {tensors} tensors, {document['config']['ranks']} ranks: "
                    f"{min(shares):.2f}-{max(shares):.2f} of float's rate in bytes."
                )


def _latency(documents: dict[str, Any]) -> Iterator[str]:
    for document in (*_named(documents, "latency_"), *_named(documents, "busy_")):
        beside = document["config"].get("beside", 0)
        company = f" beside {beside} busy processes" if beside else ""
        for row in document["results"]:
            details = _details(row)
            if details:
                theirs = [_details(other) for other in _rows(document, _BASELINE, row["experiment_name"], row["size"])]
                gloo = f", gloo {theirs[0]['p50_us']:.1f} us" if theirs and theirs[0] else ""
                yield ""
                yield (
                    f"{row['experiment_name']} of {row['size']} bytes, {document['config']['ranks']} rank(s){company}: "
                    f"{details['p50_us']:.1f} us (p99 {details['p99_us']:.1f}){gloo}."
                )


def _groups(documents: dict[str, Any]) -> Iterator[str]:
    for document in _named(documents, "groups_"):
        for row_name, row in document["table"].items():
            yield ""
            yield (
                f"{row_name} group of {document['header']['ranks']} ranks: {row['ms']:.1f} ms, "
                f"{row['ms_per_rank']:.2f} ms per rank."
            )


def _named(documents: dict[str, Any], start: str) -> Iterator[dict[str, Any]]:
    return (document for name, document in documents.items() if name.startswith(start))


def _rows(document: dict[str, Any], peer: str, operation: str, size: int | None = None) -> list[dict[str, Any]]:
    if peer == document["backend"]:
        rows = document["results"]
    else:
        rows = document["peers"].get(peer, {"results": []})["results"]
    return [row for row in rows if row["experiment_name"] == operation and size in (None, row["size"])]


def _details(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of a row's call in place, or out of place where there is none; None where nothing was timed."""
    if row is None:
        return None
    details: dict[str, Any] | None = row.get("in_place_per_iter") or row.get("out_of_place_per_iter")
    return details
