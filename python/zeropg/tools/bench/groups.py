"""`python -m zeropg bench groups`: what it takes to make a process group, beside gloo."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_groups
from zeropg.tools.bench.results import Row, Spread, ratios

BACKENDS = ("zeropg", "gloo")
STAGES = ("first", "further")  # the world's group, and another one beside it
_TIMEOUT = timedelta(seconds=120)

_DESCRIPTION = """
Times how long the ranks of this machine take to make a group that works, zeropg beside gloo. The time runs from the
last rank's call until the last rank has the result of a 4-byte all-reduce over the new group. The first group is the
world's, by init_process_group; the further one is made by new_group. The backends take turns; all groups are destroyed
in between.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench groups                     16 ranks
  python -m zeropg bench groups -n 4 --rounds 20    4 ranks, more turns

status: 0 measured; 1 a result was wrong or a rank failed; 2 wrong options; 3 other programs used the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Starts its own ranks."""
    options = _parse(arguments)
    if options.result is not None:
        return _run_rank(options)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        status = harness.start_ranks(options.ranks, ["bench", "groups", *arguments, "--result", str(result)])
        if status != 0:
            return harness.WRONG
        measured = harness.read_json(result)
    quiet.others_during = measured["others_cpus_during"]
    facts = harness.header("groups", arguments, quiet, ranks=options.ranks, rounds=options.rounds)
    rows = _rows(measured["milliseconds"], quiet.may_claim)
    harness.print_header(facts)
    print(f"{'':18} {'ms':>9} {'ms/rank':>9} {'lowest':>9} {'highest':>9}   gloo's time / this")
    for row in rows:
        print(_line(row, options.ranks))
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")
    return harness.finish(options, quiet, facts, rows, plot_groups)


def _rows(milliseconds: dict[str, list[float]], may_claim: bool) -> list[Row]:
    rows = []
    for name, values in milliseconds.items():
        peer, stage = name.split()
        figures: dict[str, Spread | float] = {"time_ms": Spread.of(values)}
        if may_claim:
            figures["faster_than_gloo"] = ratios(milliseconds[f"gloo {stage}"], values)
        rows.append(Row(stage, peer, figures))
    return rows


def _line(row: Row, ranks: int) -> str:
    spread, ratio = row.figures["time_ms"], row.figures.get("faster_than_gloo", "not claimed")
    assert isinstance(spread, Spread)
    columns = f"{spread.median:9.2f} {spread.median / ranks:9.3f} {spread.low:9.2f} {spread.high:9.2f}"
    return f"{row.peer + ' ' + row.case:18} {columns}   {ratio}"


def _run_rank(options: argparse.Namespace) -> int:
    """One rank; rank 0 writes what it and the others measured."""
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from zeropg.backend import leave_groups  # the import registers the backend where the package is not installed

    torch.set_num_threads(1)
    store, rank, world_size = next(rendezvous("env://", timeout=_TIMEOUT))
    load, own = machine.OthersLoad(), time.process_time()
    milliseconds: dict[str, list[float]] = {f"{name} {stage}": [] for name in BACKENDS for stage in STAGES}
    for turn in range(options.warm_up + options.rounds):
        for name in harness.in_turn(BACKENDS, turn):
            prefix = PrefixStore(f"{turn} {name}", store)
            taken = [
                _time(_init(name, prefix, rank, world_size), prefix, rank, world_size),
                _time(_add(name), PrefixStore("further", prefix), rank, world_size),
            ]
            leave_groups()
            if turn >= options.warm_up:
                for stage, took in zip(STAGES, taken, strict=True):
                    milliseconds[f"{name} {stage}"].append(took)
    spent = time.process_time() - own
    store.set(f"spent {rank}", str(spent))
    if rank == 0:
        total = sum(float(store.get(f"spent {each}")) for each in range(world_size))
        figures = {"milliseconds": milliseconds, "others_cpus_during": load.stop(total)}
        harness.write_json(options.result, figures)
    return 0


def _init(name: str, store: Any, rank: int, world_size: int) -> Callable[[], Any]:
    import torch.distributed as dist

    def call() -> Any:
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        return dist.group.WORLD

    return call


def _add(name: str) -> Callable[[], Any]:
    import torch.distributed as dist

    return lambda: dist.new_group(backend=name, timeout=_TIMEOUT)


def _time(make: Callable[[], Any], store: Any, rank: int, world_size: int) -> float:
    """Milliseconds from the last rank's call to the last rank's result; the ranks share a clock, being on one machine.

    Raises RuntimeError where the new group adds up wrongly.
    """
    import torch
    import torch.distributed as dist

    store.set(f"here {rank}", "")
    store.wait([f"here {each}" for each in range(world_size)], _TIMEOUT)
    start = time.monotonic()
    group = make()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    end = time.monotonic()
    if ones.item() != world_size:
        raise RuntimeError(f"{world_size} ranks added up to {ones.item()}")
    times = torch.tensor([start, end], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return 1000 * (times[1] - times[0]).item()


def _parse(arguments: list[str]) -> argparse.Namespace:
    output = "benchmarks/results/groups_16_ranks.json"
    parser = harness.make_parser("groups", _DESCRIPTION, _EXAMPLES, output=output)
    parser.add_argument("-n", "--ranks", type=int, default=16, help="ranks to start (default 16)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each backend (default 10)")
    parser.add_argument("-w", "--warm-up", type=int, default=2, help="turns before these (default 2)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.ranks, options.rounds) < 1 or options.warm_up < 0:
        parser.error("--ranks and --rounds must be positive, --warm-up not negative")
    if harness.is_a_rank() and options.result is None:
        parser.error("this suite starts its own ranks: run it without torchrun, with --ranks")
    return options
