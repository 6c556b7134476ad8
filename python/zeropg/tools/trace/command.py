"""`python -m zeropg trace`: where the time of a step goes, from what a run with ZEROPG_TRACE recorded."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from zeropg.tools.command_line import make_parser
from zeropg.tools.trace.chrome import chrome_events
from zeropg.tools.trace.page import write_page
from zeropg.tools.trace.read import RankTrace, TraceError, models_in, read_traces
from zeropg.tools.trace.table import lines_of

_DESCRIPTION = """
Shows what a sharded model did in some steps: forward and backward of each unit, gathers of parameters and reductions of
gradients, how long ranks waited for them, the optimizer's step, and memory by class. Record first, with the environment
variable ZEROPG_TRACE: any program that calls zeropg.fully_shard or zeropg.initialize will do, and it ends as always.
"""
_EXAMPLES = """
examples:
  ZEROPG_TRACE=trace torchrun --standalone --nproc-per-node 2 train.py      record steps 3 to 6
  ZEROPG_TRACE=trace ZEROPG_TRACE_STEPS=10-12 torchrun ... train.py         record others
  python -m zeropg trace trace                                              a table; trace/trace.html, trace/trace.json

columns: "gather" and "reduce" last from when one begins to when its result is taken, behind whatever runs meanwhile;
"waited" is the part of it in which the rank had nothing else to do. Stages 0 to 2 gather nothing in forwards.

trace.html needs no network. trace.json is for chrome://tracing and https://ui.perfetto.dev.
On several hosts give ZEROPG_TRACE a shared folder, or copy the files of all ranks into one.

status: 0 shown; 1 nothing that can be shown; 2 wrong options
"""


def main(arguments: list[str]) -> int:
    """Print the table and write the files that `arguments` ask for; returns the exit status."""
    options = _parse(arguments)
    try:
        return _show(options.directory, options.model)
    except TraceError as error:
        print(f"zeropg trace: {error}.", file=sys.stderr)
        return 1


def _show(directory: Path, wanted: int | None) -> int:
    models = models_in(directory)
    if not models:
        raise TraceError(f"{directory} has no traces; run the program with ZEROPG_TRACE={directory}")
    model = models[0] if wanted is None else wanted
    if model not in models:
        raise TraceError(f"{directory} has no model {model}, only {', '.join(map(str, models))}")
    traces = read_traces(directory, model)
    print("\n".join(lines_of(traces)))
    if len(models) > 1:
        print(f"\nmodel {model} of {', '.join(map(str, models))}; --model chooses another")
    if missing := sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces}):
        print(f"no events of rank {', '.join(map(str, missing))}", file=sys.stderr)
    _write(directory, model, traces)
    return 0


def _write(directory: Path, model: int, traces: list[RankTrace]) -> None:
    suffix = "" if model == 0 else f".model{model}"
    chrome = directory / f"trace{suffix}.json"
    chrome.write_text(json.dumps(chrome_events(traces)))
    page = directory / f"trace{suffix}.html"
    try:
        write_page(traces, f"zeropg: stage {traces[0].stage}, {traces[0].world_size} ranks", page)
    except ImportError:
        print(f"\n{chrome}; for the page as well: pip install plotly")
        return
    print(f"\n{page}, {chrome}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("trace", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("directory", type=Path, help="what ZEROPG_TRACE was")
    parser.add_argument("--model", type=int, help="the number of one of several, from 0; default: the first")
    return parser.parse_args(arguments)
