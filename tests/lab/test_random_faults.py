"""Random faults under random programs on simulated hosts: what passes changes no result, and what does not is an error.

On every rank that is left, before the deadline and a margin have passed, and it names a culprit. What a call returned
before was right. ZEROPG_PROGRAM_SEED=N tries fault N alone, as a failure's message says; ZEROPG_PROGRAM_SECONDS=N goes
on for so long with faults that nobody has tried.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.backend.deadlines import give_seconds
from tests.backend.random_calls import Program
from tests.lab.faults import BY_A_RANK, Plan, misbehave, relent, strike
from tests.lab.place import HostsPlace
from tests.spawn import RankPool
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]

SEEDS = (3, 7, 25, 32, 37)  # exit, leave, kill while joining, kill a host, pause
JOIN_TIMEOUT = 10.0
CALL_TIMEOUT = 4.0
MARGIN = 12.0  # for a busy machine, and for the bookkeeping after the deadline
HANG = 60.0
CALLS_BETWEEN_LOOKS = 10  # of a program, before all ask whether they shall stop


class Outcome(NamedTuple):
    error: str  # "": none
    time: float  # of the machine's clock
    leaving: float  # seconds that it took to leave the group after it


def play(plan: Plan, folder: str) -> Outcome:
    """Plays until the file `stop` is there, or an error comes; leaves the group."""
    torch.set_num_threads(1)
    error = ""
    try:
        _play(plan, Path(folder))
    except RuntimeError as failure:  # torch's errors of communication are; a wrong result is an AssertionError
        error = str(failure)
    failed = time.time()
    if plan.fault == "idle" and dist.get_rank() == plan.victim:
        time.sleep(CALL_TIMEOUT + 2)
    if dist.is_initialized():
        dist.destroy_process_group()
    return Outcome(error, failed, time.time() - failed)


def _play(plan: Plan, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    (folder / f"join{rank}").touch()
    join_timeout = timedelta(seconds=JOIN_TIMEOUT)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=60))
    dist.init_process_group(
        "zeropg",
        store=dist.PrefixStore(str(plan.seed), store),
        rank=rank,
        world_size=plan.world_size,
        timeout=join_timeout,
        pg_options=zeropg.BackendOptions(
            connections=plan.connections, authenticate_frames=plan.authenticate_frames, network=plan.network
        ),
    )
    program = Program(plan.seed, groups=plan.groups, largest_block_bits=17, join_timeout=join_timeout)
    for group in dist.distributed_c10d._world.pg_map:
        give_seconds(group, CALL_TIMEOUT)
    (folder / f"play{rank}").touch()
    is_mine = plan.fault in BY_A_RANK and rank == plan.victim
    calls = 0
    while True:
        if is_mine and plan.calls < calls + CALLS_BETWEEN_LOOKS:
            program.play(plan.calls - calls)
            (folder / "struck").touch()
            misbehave(plan.fault)
            return
        program.play(CALLS_BETWEEN_LOOKS)
        calls += CALLS_BETWEEN_LOOKS
        stop = torch.tensor([int((folder / "stop").exists())])
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop.item():
            program.finish()
            return


@contextmanager
def controlled(plan: Plan, lab: Lab, ranks: RankPool, folder: Path) -> Iterator[list[float]]:
    """Strikes at the plan's moment; the list then holds the time at which it did."""
    struck: list[float] = []
    is_over = threading.Event()

    def pid_of(rank: int) -> int:
        parent = ranks._processes[rank].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    def control() -> None:
        while len([*folder.glob(f"{plan.moment}*")]) < plan.world_size and not is_over.wait(0.005):
            pass
        is_over.wait(plan.delay)
        struck.append(time.time())
        strike(plan, lab, pid_of)
        if plan.passes:
            is_over.wait(plan.length)
            relent(plan, lab, pid_of)
            is_over.wait(0.3)
            (folder / "stop").touch()
        elif plan.fault == "stop rank":
            is_over.wait(JOIN_TIMEOUT + 2 if plan.moment == "join" else CALL_TIMEOUT + 2)
            relent(plan, lab, pid_of)

    thread = threading.Thread(target=control)
    if plan.fault not in BY_A_RANK:
        thread.start()
    try:
        yield struck
    finally:
        is_over.set()
        if plan.fault not in BY_A_RANK:
            thread.join()


def try_fault(plan: Plan, folder: Path) -> None:
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts=plan.hosts, rate="1gbit"))
        place = HostsPlace(lab, per_host=plan.per_host)
        ranks = stack.enter_context(RankPool(plan.world_size, backend=None, place=place))
        struck = stack.enter_context(controlled(plan, lab, ranks, folder))
        outcomes = ranks.run(play, plan, str(folder), timeout=HANG, expect_death=plan.dead)
        if plan.fault in BY_A_RANK:
            struck.append((folder / "struck").stat().st_mtime)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    for outcome in failed.values():
        assert outcome.leaving < MARGIN, f"it took {outcome.leaving} s to leave the group"
    if plan.passes:
        assert not any(outcome.error for outcome in failed.values()), failed
        return
    limit = (JOIN_TIMEOUT if plan.moment == "join" else CALL_TIMEOUT) + MARGIN
    for rank, outcome in failed.items():
        if rank == plan.victim and plan.fault in ("stop rank", *BY_A_RANK):
            continue  # what it says of itself
        assert "[zeropg rank" in outcome.error, (rank, outcome)
        assert outcome.time - struck[0] < limit, f"rank {rank} noticed after {outcome.time - struck[0]} s: {outcome}"
        if plan.cuts_off_from_the_store(rank) and "the store at" in outcome.error:
            continue
        assert accused(rank, failed) & plan.culprits(rank), f"rank {rank} names no culprit: {failed}"


def accused(rank: int, failed: dict[int, Outcome]) -> set[int]:
    """Whom the error of `rank` names, and whom theirs name: a rank may wait for one that waits in another group."""
    found: set[int] = set()
    new = {rank}
    while new:
        found |= new
        new = {other for each in new if each in failed for other in named(failed[each].error)} - found
    return found - {rank}


def named(text: str) -> set[int]:
    """The global ranks that an error speaks of, besides those that raise it."""
    found: set[int] = set()
    for part in text.split("[zeropg rank ")[1:]:
        title, _, body = part.partition("]")
        members = [int(number) for number in re.findall(r"\d+", title.partition(" of global rank")[2])]
        for listed in re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", body):
            ranks = [int(number) for number in re.findall(r"\d+", listed)]
            found |= {members[each] for each in ranks} if members else set(ranks)
    return found


def seeds() -> Iterator[int]:
    if "ZEROPG_PROGRAM_SEED" in os.environ:
        yield int(os.environ["ZEROPG_PROGRAM_SEED"])
        return
    yield from SEEDS
    end = time.monotonic() + float(os.environ.get("ZEROPG_PROGRAM_SECONDS", 0))
    while time.monotonic() < end:
        yield random.randrange(1 << 30)


def test_faults_end_in_errors_that_name_a_culprit(tmp_path: Path) -> None:
    for seed in seeds():
        plan = Plan.of(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            try_fault(plan, folder)
        except AssertionError as error:
            raise AssertionError(f"fault {seed} (ZEROPG_PROGRAM_SEED={seed}), {plan}: {error}") from error
