"""What one rank does: every point of a plan, with both peers in turns. Rank 0 tells what came out."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropg.backend import leave_groups  # the import registers the backend where the package is not installed
from zeropg.tools.bench import cases, harness
from zeropg.tools.bench.cases import Buffers, Group, Shape
from zeropg.tools.bench.nodes.cases import PEERS, Point
from zeropg.tools.bench.nodes.dialogue import Dialogue, Plan
from zeropg.tools.bench.nodes.standstills import EVERY, standstills
from zeropg.tools.bench.nodes.steps import STEPS, Step
from zeropg.tools.bench.peers import open_peers

_TIMEOUT = timedelta(seconds=120)
_MOST_CALLS = 200  # of a turn
_STANDSTILLS = 4  # in a turn, at least
_CHECKED_STEPS = 3
_SAME_LOSS = 1e-4  # relative, after these

Call = Callable[[], None]


def run_plan(dialogue: Dialogue) -> None:
    """Every rank of a lab calls it, with torchrun's variables. Raises RuntimeError where a result is wrong."""
    plan = dialogue.plan()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)  # for agreement; the peers have groups of their own
    peers = open_peers(PEERS, _TIMEOUT)
    meeting = peers["zeropg"].group._get_backend(torch.device("cpu"))
    contest = _Contest(plan, dialogue, meeting)
    for point in plan.points:
        groups = {name: peer.group for name, peer in peers.items()}
        calls, fill = _steps(point, groups) if point.operation in STEPS else _collectives(point, groups)
        measured = PROGRAMS[plan.program](contest, calls, fill)
        if dist.get_rank() == 0:
            dialogue.tell(measured)
        del calls, fill, groups
    del peers, meeting, contest
    leave_groups()


def _collectives(point: Point, groups: dict[str, Group]) -> tuple[dict[str, Call], Call]:
    """The operation by each peer, checked once, and what fills its buffers anew."""
    case = cases.CASES[point.operation]
    world_size = dist.get_world_size()
    count = max(1, point.bytes // 4 // (world_size if case.blocks else 1))
    shape = Shape(count, torch.float32, "sum" if case.reduces else "none", dist.get_rank(), world_size)
    buffers = case.make(shape, case.in_place[0], cases.empty_on_heap)
    for name, group in groups.items():
        _check(name, group, buffers, point)
    return {name: functools.partial(buffers.call, group) for name, group in groups.items()}, buffers.fill


def _check(name: str, group: Group, buffers: Buffers, point: Point) -> None:
    buffers.fill()
    buffers.call(group)
    wrong = torch.tensor(buffers.wrong())
    dist.all_reduce(wrong)
    if wrong:
        raise RuntimeError(f"{name}'s {point.operation} of {point.bytes} bytes has {wrong.item()} wrong elements")


def _steps(point: Point, groups: dict[str, Group]) -> tuple[dict[str, Call], Call]:
    """A step by each peer, of models that have the same losses; there is nothing to fill."""
    steps = {name: Step(point.operation, group) for name, group in groups.items()}
    for step in steps.values():
        for _ in range(_CHECKED_STEPS):
            step()
    losses = [step.loss for step in steps.values()]
    if max(losses) - min(losses) > _SAME_LOSS * max(losses):
        raise RuntimeError(f"{', '.join(steps)} train to losses of {losses}")
    return dict(steps), lambda: None


class _Contest:
    """The parts of which programs are made."""

    def __init__(self, plan: Plan, dialogue: Dialogue, meeting: Group) -> None:
        self.plan = plan
        self._dialogue = dialogue
        self._meeting = meeting  # zeropg's, for both peers alike
        self._together = dist.BarrierOptions()
        self._together.asyncOp = False

    def rounds(self, calls: dict[str, Call]) -> Iterator[tuple[int, str, Call]]:
        """(round, peer, its call): every peer has a turn in each round, in changing order."""
        for number in range(self.plan.rounds):
            yield from ((number, name, call) for name, call in harness.in_turn(calls.items(), number))

    def meet(self) -> None:
        self._meeting.barrier(self._together).wait()

    def seconds(self, call: Call, count: int) -> list[float]:
        """Of each of `count` calls, that of the slowest rank."""
        times = torch.empty(count, dtype=torch.float64)
        for number in range(count):
            self.meet()
            begin = time.perf_counter()
            call()
            times[number] = time.perf_counter() - begin
        return self.slowest(times)

    def slowest(self, times: torch.Tensor) -> list[float]:
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()

    def cpu_seconds(self, call: Call, count: int) -> float:
        """Of all ranks, for a call; calls follow each other without a barrier, whose time would count."""
        self.meet()
        begin = time.process_time()
        for _ in range(count):
            call()
        self.meet()
        total = torch.tensor([time.process_time() - begin], dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / count

    def fitting(self, call: Call, seconds: float) -> int:
        """How many calls fit into so many seconds; the same on every rank."""
        call()
        (once,) = self.seconds(call, 1)
        return max(1, min(_MOST_CALLS, int(seconds / once)))

    def change_rate(self, host: int, rate: str | None) -> None:
        if dist.get_rank() == 0:
            self._dialogue.change_rate(host, rate, _TIMEOUT.total_seconds() / 2)
        dist.barrier()


def _turns(contest: _Contest, calls: dict[str, Call], fill: Call) -> dict[str, Any]:
    """{"seconds": peer -> round -> of each call, "cpu_seconds": peer -> round -> of a call}"""
    counts = {name: contest.fitting(call, contest.plan.turn_seconds) for name, call in calls.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, name, call in contest.rounds(calls):
        fill()
        call()
        seconds[name].append(contest.seconds(call, counts[name]))
        if contest.plan.counts_cpu:
            fill()
            cpu_seconds[name].append(contest.cpu_seconds(call, counts[name]))
    return {"seconds": seconds} | ({"cpu_seconds": cpu_seconds} if contest.plan.counts_cpu else {})


def _drop(contest: _Contest, calls: dict[str, Call], fill: Call) -> dict[str, Any]:
    """{"seconds": peer -> round -> of each call, in thirds: at the usual rate, at the lower one, at the usual again}"""
    assert contest.plan.drops is not None
    host, lower, usual = contest.plan.drops
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _, name, call in contest.rounds(calls):
        fill()
        call()
        times = contest.seconds(call, contest.plan.operations)
        for rate in (lower, usual):
            contest.change_rate(host, rate)
            fill()
            times += contest.seconds(call, contest.plan.operations)
        seconds[name].append(times)
    return {"seconds": seconds}


def _stopped(contest: _Contest, calls: dict[str, Call], fill: Call) -> dict[str, Any]:
    """{"undisturbed", "seconds": peer -> round -> of a call}; in the second the last rank stands still at times."""
    seconds = max(_STANDSTILLS * EVERY, contest.plan.turn_seconds)
    counts = {name: contest.fitting(call, seconds) for name, call in calls.items()}
    found: dict[str, dict[str, list[float]]] = {key: {name: [] for name in calls} for key in ("undisturbed", "seconds")}
    for _, name, call in contest.rounds(calls):
        for key, of_each in found.items():
            fill()
            call()
            with standstills() if key == "seconds" and _is_last() else contextlib.nullcontext():
                contest.meet()
                begin = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                times = torch.tensor([(time.perf_counter() - begin) / counts[name]], dtype=torch.float64)
            of_each[name] += contest.slowest(times)
    return found


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


PROGRAMS = {"turns": _turns, "drop": _drop, "stopped": _stopped}
