"""The ranks' part of `bench collectives`: check, warm up, time, in turns; rank 0 prints each row when it is done."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeropg  # noqa: F401  (registers the backend where the package is not installed)
from zeropg._native import _C
from zeropg.backend import leave_groups
from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.cases import CASES, DTYPES, Buffers, Case, Group, Shape
from zeropg.tools.bench.peers import BACKENDS, Peer, open_peers
from zeropg.tools.bench.results import Spread

_TIMEOUT = timedelta(seconds=120)
_LEAST_ITERATIONS = 3
_STREAMING_BYTES = 8 << 20  # of all ranks; from here on writing past the caches is the faster way (copy.h)
_COPY, _UPDATE, _MOVE = "copy", "update", "move"  # beside the peers' names


@dataclass(frozen=True)
class _Bounds:
    """What the memory does, all ranks at once; from the medians of rounds, in us."""

    copy_us: float  # to copy `size` bytes
    pass_us: float  # to read or write `size` bytes in the fastest way that was tried: a bound must be that


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures on the ranks of the environment; every rank calls it. Rank 0's return value holds everything."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)  # for agreement; the peers have groups of their own
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    peers = open_peers(options.peers, _TIMEOUT)
    bench = _Bench(options, peers)
    load, own = machine.OthersLoad(), time.process_time()
    with _busy_processes(options.beside if dist.get_rank() == 0 else 0) as busy:
        for case, shapes in _points(options):
            bench.run(case, shapes)
    bench.print_footer()
    spent = torch.tensor([time.process_time() - own + busy.seconds], dtype=torch.float64)
    dist.all_reduce(spent)
    others = load.stop(spent.item())
    devices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(devices, _device())
    result = {
        "start_time": start,
        "ranks": dist.get_world_size(),
        "devices": devices,
        "results": bench.results,
        "others_cpus_during": others,
        "versions": {name: peer.group.version for name, peer in bench.peers.items() if not BACKENDS[name]},
    }
    del bench, peers
    leave_groups()
    return result


class _Busy:
    seconds = 0.0  # of CPU, once they have ended


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[_Busy]:
    """Keeps `count` processes busy meanwhile; they end with this one, however it ends."""
    program = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    busy, before = _Busy(), resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(count)]
    try:
        yield busy
    finally:
        for process in processes:
            process.kill()
            process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy.seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@dataclass(frozen=True)
class _Contender:
    """Who takes turns with whom: a peer, with elements of one dtype."""

    peer: str
    shape: Shape


def _points(options: argparse.Namespace) -> Iterator[tuple[Case, list[Shape]]]:
    """What is measured together, in order: an operation on as many bytes of every dtype."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtypes = [DTYPES[name] for name in options.datatype]
    for name in options.op:
        case = CASES[name]
        if name == "barrier":
            yield case, [Shape(0, torch.float32, "none", rank, world_size)]
            continue
        blocks = world_size if case.blocks else 1
        for redop in options.redop if case.reduces else ["none"]:
            # Sizes are rounded down to whole elements, so small ones may be the same and those of dtypes differ.
            by_bytes: dict[int, list[Shape]] = {}
            size = options.b
            while size <= options.e:
                for dtype in dtypes:
                    shape = Shape(max(1, size // dtype.itemsize // blocks), dtype, redop, rank, world_size)
                    together = by_bytes.setdefault(case.bytes_of(shape), [])
                    if shape not in together:
                        together.append(shape)
                size *= options.f
            yield from ((case, together) for _, together in sorted(by_bytes.items()))


class _Bench:
    """Runs points one after another and keeps their rows per peer."""

    def __init__(self, options: argparse.Namespace, peers: dict[str, Peer]) -> None:
        self.options = options
        self.peers = peers
        # Whose barrier starts every iteration, for all peers alike. The backend's own: the dispatcher takes three times
        # as long over one (it looks for devices), and on shared CPUs that would count as the others' waiting time.
        group: Group = next((peer.group for name, peer in peers.items() if BACKENDS[name]), dist.group.WORLD)
        self.meeting: Group = group._get_backend(torch.device("cpu"))
        self.together = dist.BarrierOptions()
        self.together.asyncOp = False
        self.results: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
        self._is_leader = dist.get_rank() == 0
        self._table = ""

    def run(self, case: Case, shapes: list[Shape]) -> None:
        """Measures every peer with every shape, in and out of place; the shapes are of one size in bytes."""
        contenders = [_Contender(name, shape) for shape in shapes for name in self.peers]
        size = case.bytes_of(shapes[0])
        rows: dict[_Contender, dict[str, Any]] = {each: self._row(case, each.shape, size) for each in contenders}
        for in_place in case.in_place:
            place = "in_place" if in_place else "out_of_place"
            # Peers whose tensors are of one kind take turns on the same ones.
            make = functools.cache(lambda shape, empty, in_place=in_place: case.make(shape, in_place, empty))
            buffers = {each: make(each.shape, self.peers[each.peer].empty) for each in contenders}
            wrong = {each: self._check(self.peers[each.peer].group, buffers[each]) for each in contenders}
            able = {each: buffers[each] for each, count in wrong.items() if count == 0}
            bounds, times = self._time(able, size)
            for each, count in wrong.items():
                row = rows[each]
                if each in times:
                    row[place], row[f"{place}_per_iter"] = self._figures(case, size, times[each], bounds, in_place)
                elif count is not None:  # wrong: nothing to time
                    row[place] = {"time": 0.0, "alg_bw": 0.0, "bus_bw": 0.0, "nwrong": count}
        for each, row in rows.items():
            if row["in_place"] or row["out_of_place"]:
                self.results[each.peer].append(row)
            self._print(each.peer, case, row)

    def _row(self, case: Case, shape: Shape, size: int) -> dict[str, Any]:
        dtype = next(name for name, dtype in DTYPES.items() if dtype == shape.dtype)
        return {
            "size": size,
            "count": shape.count,
            "type": dtype,
            "redop": shape.redop,
            "root": str(shape.root if case.rooted else -1),
            "out_of_place": None,
            "in_place": None,
            "actual_iterations": self.options.iterations * self.options.rounds,
            "experiment_name": case.name,
        }

    def _check(self, group: Group, buffers: Buffers) -> int | None:
        """Wrong elements over all ranks; None where the peer has no such operation for this dtype."""
        buffers.fill()
        refused = 0
        try:
            buffers.call(group)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if isinstance(error, dist.DistError):  # a failure between ranks, not a refusal
                raise
            refused = 1
        answer = torch.tensor([refused, 0 if refused else buffers.wrong()])
        dist.all_reduce(answer)
        if 0 < answer[0] < dist.get_world_size():
            raise RuntimeError(f"only {int(answer[0])} of {dist.get_world_size()} ranks refused the operation")
        return None if answer[0] else int(answer[1])

    def _time(self, able: dict[_Contender, Buffers], size: int) -> tuple[_Bounds, dict[_Contender, Tensor]]:
        """What the memory can do with `size` bytes, and per contender [rounds, iterations] in us."""
        words = max(2, size // 4)
        half = words // 2
        source = torch.zeros(words, dtype=torch.int32)
        copy = torch.empty_like(source)
        first, second = copy[:half], copy[half : 2 * half]
        is_streaming = size * dist.get_world_size() >= _STREAMING_BYTES
        calls: dict[str | _Contender, Callable[[], Any]] = {
            _COPY: lambda: _C.copy_bytes(copy, source, is_streaming),
            _UPDATE: lambda: copy.add_(1),
            _MOVE: lambda: _C.copy_bytes(second, first, is_streaming),
        }
        calls |= {each: functools.partial(buffers.call, self.peers[each.peer].group) for each, buffers in able.items()}
        iterations = {each: self._iterations(call) for each, call in calls.items()}
        turns: dict[str | _Contender, list[Tensor]] = {each: [] for each in calls}
        for turn in range(self.options.rounds):
            for each in harness.in_turn(calls, turn):
                if isinstance(each, _Contender):
                    able[each].fill()
                for _ in range(min(self.options.w, iterations[each])):
                    calls[each]()
                turns[each].append(self._turn(calls[each], iterations[each]))
        times = {each: torch.stack(turns[each]) for each in calls}
        for mine in times.values():
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)  # an operation takes as long as its slowest rank
        copies, updates, moves = (times[loop].median(dim=1).values for loop in (_COPY, _UPDATE, _MOVE))
        # A copy and an update pass over `size` bytes twice, a copy inside the buffer once: where caches are large, what
        # touches less memory is faster per byte too.
        pass_us = min(copies.min().item() / 2, updates.min().item() / 2, moves.min().item())
        return _Bounds(copies.median().item(), pass_us), {each: times[each] for each in able}

    def _turn(self, call: Callable[[], Any], iterations: int) -> Tensor:
        times = torch.empty(iterations, dtype=torch.float64)
        for iteration in range(iterations):
            self.meeting.barrier(self.together).wait()
            start = time.perf_counter_ns()
            call()
            times[iteration] = (time.perf_counter_ns() - start) / 1000
        return times

    def _iterations(self, call: Callable[[], Any]) -> int:
        """As many as asked for, or fewer where a turn would take too long; the same on every rank."""
        call()
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        fitting = int(self.options.turn_seconds / max(seconds.item(), 1e-9))
        wanted: int = self.options.iterations
        return min(wanted, max(_LEAST_ITERATIONS, fitting))

    def _figures(
        self, case: Case, size: int, times: Tensor, bounds: _Bounds, in_place: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        world_size = dist.get_world_size()
        every = times.flatten().sort().values
        p50 = every.median().item()  # as of a round: it never lies outside of the rounds' medians
        algbw = size / p50 / 1000
        least_bytes = (in_place and case.least_bytes_in_place) or case.least_bytes
        least_us = bounds.pass_us * least_bytes(world_size)
        mean, deviation = every.mean().item(), every.std(correction=0).item()
        timing = {"time": p50, "alg_bw": algbw, "bus_bw": algbw * case.bus_factor(world_size), "nwrong": 0}
        details = {
            "min_us": every[0].item(),
            "max_us": every[-1].item(),
            "avg_us": mean,
            "p50_us": p50,
            "p95_us": every[min(len(every) - 1, -(-len(every) * 95 // 100) - 1)].item(),
            "p99_us": every[min(len(every) - 1, -(-len(every) * 99 // 100) - 1)].item(),
            "stdev_us": deviation,
            "cv_pct": 100 * deviation / mean if mean > 0 else 0.0,
            "round_medians_us": times.median(dim=1).values.tolist(),
            "percent_of_bound": 100 * least_us / p50,
            "percent_of_staged_bound": 100 * bounds.pass_us * case.staged_bytes(world_size) / p50,
            "times_copy": p50 / bounds.copy_us,
        }
        return timing, details

    def _print(self, name: str, case: Case, row: dict[str, Any]) -> None:
        if not self._is_leader:
            return
        if self._table != case.name:
            self._table = case.name
            print(_heading(case.name), flush=True)
        columns = f"{row['size']:12} {row['count']:12} {row['type']:>9} {row['redop']:>6} {row['root']:>6}"
        for place in ("out_of_place", "in_place"):
            timing = row[place]
            if timing is None:
                columns += f" {'N/A':>9} {'N/A':>7} {'N/A':>7} {'N/A':>6}"
            else:
                columns += (
                    f" {timing['time']:9.2f} {timing['alg_bw']:7.2f} {timing['bus_bw']:7.2f} {timing['nwrong']:6}"
                )
        details = row.get("in_place_per_iter") or row.get("out_of_place_per_iter")
        if details is None:
            columns += f" {'-':>9} {'-':>9} {'-':>7} {'-':>6}"
        else:
            columns += f" {details['p50_us']:9.2f} {details['p99_us']:9.2f} {details['percent_of_bound']:7.1f}"
            columns += f" {details['times_copy']:6.2f}"
        print(f"{columns}  {name}", flush=True)

    def print_footer(self) -> None:
        """nccl-tests' last lines, per peer."""
        if not self._is_leader:
            return
        for name, rows in self.results.items():
            timings = [row[place] for row in rows for place in ("out_of_place", "in_place") if row[place]]
            wrong = sum(timing["nwrong"] for timing in timings)
            bandwidth = Spread.of([timing["bus_bw"] for timing in timings] or [0.0])
            print(f"# {name}: Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
            average = sum(timing["bus_bw"] for timing in timings) / max(1, len(timings))
            print(f"# {name}: Avg bus bandwidth    : {average:g} (best {bandwidth.high:.2f})", flush=True)


def _heading(name: str) -> str:
    """nccl-tests' heading, above the widths of `_Bench._print`."""
    places = "".join(f" {'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6}" for _ in range(2))
    units = "".join(f" {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':6}" for _ in range(2))
    return "\n".join(
        [
            f"#\n# {name}",
            f"#{'out-of-place':>82}{'in-place':>33}",
            f"#{'size':>11} {'count':>12} {'type':>9} {'redop':>6} {'root':>6}{places} {'p50':>9} {'p99':>9}"
            f" {'%bound':>7} {'x copy':>6}  peer",
            f"#{'(B)':>11} {'(elements)':>12} {'':9} {'':6} {'':6}{units} {'(us)':>9} {'(us)':>9}",
        ]
    )


def _device() -> dict[str, Any]:
    return {
        "rank": dist.get_rank(),
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "device": 0,
        "device_hex": "",
        "device_info": f"cpu {machine.cpu_model()}",
    }
