"""`python -m zeropg bench nodes`: collectives between simulated nodes, beside gloo and what their links carry."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.nodes.bounds import Links, bound_seconds, links_of
from zeropg.tools.bench.nodes.cases import CASES, Case, Point
from zeropg.tools.bench.nodes.dialogue import Dialogue, Plan
from zeropg.tools.bench.nodes.rank import run_plan
from zeropg.tools.bench.nodes.rows import NEAR, SETTLED, Measured, rows_of
from zeropg.tools.bench.nodes.steps import STEPS
from zeropg.tools.bench.plot import plot_nodes
from zeropg.tools.bench.results import Row
from zeropg.tools.lab.lab import Lab, missing
from zeropg.tools.lab.stream import stream_rates
from zeropg.tools.quantities import byte_count, size

_POLL_SECONDS = 0.05

_DESCRIPTION = f"""
Times collectives of fp32 between simulated nodes (Linux network namespaces on this machine, joined by links that `tc`
limits), zeropg beside gloo: in the same processes, in turns, the slowest rank's time, after a barrier.

  % of bound  the least time that the links allow, over the time. What a link carries is measured just before, by plain
              TCP streams from each node to the next, all at once. The bound counts the bytes that must pass each link
              whatever the algorithm; ranks of a node exchange theirs for nothing. A limited link lets 256 KiB through
              at once after a pause, so a little more than 100 % is possible. Links without a limit have no bound.
  x gloo      gloo's time over zeropg's, the median of the rounds
  CPU s/GB    processor time of all ranks for 1e9 bytes of the tensor, of calls that follow each other without a barrier

In the case `drop` a link changes its rate while the ranks work: the time of each operation is written, and how many it
takes until one is within {NEAR} bounds of the new rate; `late` is what they take {SETTLED} operations after the change.
In `stopped` the last rank stands still (SIGSTOP) for 50 ms of every second; the share is that of the undisturbed rate.
`train` times steps of a GPT of 3.2 million parameters under DistributedDataParallel and FSDP2; its size is that of the
weights, and its ranks compute on this machine's CPUs together, so it has no bound.

Needs root, or a kernel that lets users make namespaces (`python -m zeropg bench nodes` says what is missing).

cases:
""" + "\n".join(f"  {name:10} {case.what}" for name, case in CASES.items())
_EXAMPLES = """
examples:
  python -m zeropg bench nodes                                      all cases: about 25 minutes
  python -m zeropg bench nodes --quick                              fewer and shorter turns
  python -m zeropg bench nodes --case slow_link,racks               links that differ
  python -m zeropg bench nodes --case fast_2x1 --rounds 9           where the processor is the limit

status: 0 measured; 1 a result was wrong or a rank failed; 2 wrong options, or no hosts; 3 others were using the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Starts its own hosts and ranks."""
    options = _parse(arguments)
    if options.as_rank_of:
        run_plan(Dialogue(options.as_rank_of))
        return 0
    absent = missing()
    if absent:
        print(f"zeropg bench: no hosts to simulate: {absent}", file=sys.stderr)
        return 2
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    harness.print_header(harness.header("nodes", arguments, quiet))
    try:
        rows = _rows(options, quiet)
    except RuntimeError as error:
        print(f"zeropg bench: {error}; nothing is written", file=sys.stderr)
        return harness.WRONG
    if not quiet.is_quiet:
        print("# BUSY: others used the CPUs meanwhile; these figures prove nothing")
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")
    facts = harness.header("nodes", arguments, quiet, rounds=options.rounds, turn_seconds=options.turn_seconds)
    return harness.finish(options, quiet, facts, rows, plot_nodes)


def _rows(options: argparse.Namespace, quiet: harness.Quiet) -> list[Row]:
    """Of all cases; prints those of each when it is done. Raises RuntimeError where a rank fails."""
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    total = sum(len(CASES[name].points) for name in options.case)
    measured: list[Measured] = []
    with tqdm(total=total, unit="point", file=sys.stderr, leave=False, disable=not sys.stderr.isatty()) as bar:
        for name in options.case:
            found = _measure(name, options, bar)
            measured += found
            quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
            bar.clear()
            _print(CASES[name], [row for each in found for row in rows_of(each, may_claim=quiet.may_claim)])
    return [row for each in measured for row in rows_of(each, may_claim=quiet.may_claim)]


def _measure(name: str, options: argparse.Namespace, bar: tqdm) -> list[Measured]:
    """Every point of a case. Raises RuntimeError with what a failed rank printed."""
    case = CASES[name]
    points = tuple(_limited(point, options.largest) for point in case.points)
    drops = None if case.drops is None else (*case.drops, case.rates[case.drops[0]])
    plan = Plan(points, case.program, options.rounds, options.turn_seconds, options.operations, case.counts_cpu, drops)
    bar.set_description(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(len(case.rates), case.rates, case.racks, case.uplink) as lab,
    ):
        dialogue = Dialogue(Path(folder))
        dialogue.give(plan)
        links = _links(lab, case, options)
        with _following(dialogue, lab, bar):
            _run_ranks(dialogue, lab, case, options)
        results = dialogue.results()
    found = []
    for point, result in zip(points, results, strict=True):
        bounded = () if point.operation in STEPS else links
        bounds = tuple(bound_seconds(point.operation, point.bytes, each, case.ranks) for each in bounded)
        found.append(Measured(name, case, point, bounds, result))
    return found


def _limited(point: Point, largest: int | None) -> Point:
    return point if largest is None or point.operation in STEPS else Point(point.operation, min(point.bytes, largest))


def _links(lab: Lab, case: Case, options: argparse.Namespace) -> list[Links]:
    """What the links carry as they are, and where one will drop also what they carry then; nothing without limits."""
    if None in case.rates:
        return []
    nodes = len(case.rates)
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]

    def measured() -> Links:
        return links_of(ring, stream_rates(lab, ring, seconds=options.turn_seconds), case.racks)

    links = [measured()]
    if case.drops is not None:
        host, lower = case.drops
        lab.set_rate(host, lower)
        links.append(measured())
        lab.set_rate(host, case.rates[host])
    return links


def _run_ranks(dialogue: Dialogue, lab: Lab, case: Case, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "zeropg", "bench", "nodes", "--as-rank-of", str(dialogue.folder)]
    ranks = lab.ranks(*command, hosts=case.hosts, env={"TORCH_CPP_LOG_LEVEL": "ERROR"}).wait(options.timeout)
    failed = [rank.stdout + rank.stderr for rank in ranks if rank.returncode != 0]
    if failed:
        print("\n".join(text[-4000:] for text in failed), file=sys.stderr)
        raise RuntimeError(f"a rank failed, or took more than {options.timeout:g} s (--timeout)")


@contextmanager
def _following(dialogue: Dialogue, lab: Lab, bar: tqdm) -> Iterator[None]:
    """Meanwhile gives links the rates that the ranks wish for, and counts the points that are done."""
    ended, before = threading.Event(), bar.n

    def follow() -> None:
        while not ended.wait(_POLL_SECONDS):
            dialogue.fulfil(lab)
            bar.update(before + dialogue.told() - bar.n)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


_COLUMNS = {
    "time_ms": ("ms (lowest-highest)", 30),
    "percent_of_bound": ("% of bound", 22),
    "faster_than_gloo": ("x gloo", 18),
    "cpu_s_per_gb": ("CPU s/GB", 18),
    "cpu_over_gloo": ("gloo's CPU", 18),
    "undisturbed_ms": ("undisturbed", 24),
    "percent_of_undisturbed": ("% of its rate", 22),
    "dropped_over_bound": ("dropped, late / bound", 22),
    "dropped_near_after_operations": ("operations", 10),
    "restored_over_bound": ("restored, late / bound", 22),
    "restored_near_after_operations": ("operations", 10),
}


def _print(case: Case, rows: list[Row]) -> None:
    """A line per peer and point; not those of single operations."""
    rows = [row for row in rows if "number" not in row.parameters]
    columns = {key: each for key, each in _COLUMNS.items() if any(key in row.figures for row in rows)}
    print(f"\n{case.what}\n{'':34}" + "".join(f" {head:>{width}}" for head, width in columns.values()))
    for row in rows:
        what = f"{row.parameters['operation']:14} {size(int(row.parameters['bytes'])):>9} {row.peer:>8}"
        cells = (f"{row.figures.get(key, '-')!s:>{width}}" for key, (_, width) in columns.items())
        print(f"{what:34}" + "".join(f" {cell}" for cell in cells), flush=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("nodes", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/nodes.json")
    names = tuple(CASES)
    parser.add_argument(
        "--case", type=harness.choice(names), default=list(names), help=f"with commas, or all: {', '.join(names)}"
    )
    parser.add_argument("--rounds", type=int, help="turns of each peer (default 5; with --quick 2)")
    parser.add_argument(
        "--turn-seconds", type=float, help="of a turn, and of the streams before (default 2; with --quick 0.5)"
    )
    parser.add_argument(
        "--operations", type=int, default=25, help="before a link drops, and after each change (default 25)"
    )
    parser.add_argument(
        "--largest", type=byte_count, metavar="BYTES", help="make larger operations as small as that (default: none)"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one case (default 1800)")
    parser.add_argument("--quick", action="store_true", help="few and short turns: shows that it works, no more")
    parser.add_argument("--as-rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, whole, quick in (("rounds", 5, 2), ("turn_seconds", 2.0, 0.5)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    for name in ("rounds", "turn_seconds", "operations", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if harness.is_a_rank() and not options.as_rank_of:
        parser.error("this suite starts its own ranks: run it without torchrun")
    return options
