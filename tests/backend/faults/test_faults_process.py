"""What a process does to its groups: forks, ends without a word, makes and drops hundreds of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.memory import Resources, expect_no_more_than, held_resources
from tests.processes import script_on_ranks
from tests.spawn import SeparateHosts, run_ranks

SEED = random.randrange(1 << 32)


def in_a_child(function: Callable[[], str], seconds: float = 40) -> str:
    """What `function` answers in a forked child, which is killed when it takes longer."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    timer.start()
    with open(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    timer.cancel()
    return answer or f"killed after {seconds} s"


def make_a_group_of_one() -> str:
    from zeropg import _C

    options = _C.BackendOptions()
    options._timeout = timedelta(seconds=30)
    group = _C.ProcessGroupZero(dist.HashStore(), 0, 1, options)
    works = [group.allreduce([torch.ones(1000)]) for _ in range(3)]
    for work in works:
        work.wait()
    group.shutdown()
    return "works"


def fork_at_random(seed: int) -> list[str]:
    """Forks right after the first operations, when the progress thread just begins."""
    chance = random.Random(f"{seed} {dist.get_rank()}")
    answers = []
    for _ in range(3):
        group = dist.new_group()
        works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in range(3)]
        if chance.random() < 0.7:
            time.sleep(chance.uniform(0, 0.003))
        answers.append(in_a_child(make_a_group_of_one))
        answers.append(in_a_child(lambda group=group: str(dist.all_reduce(torch.ones(3), group=group))))  # type: ignore[misc]
        for work in works:
            work.wait()
        dist.barrier(group)
        dist.destroy_process_group(group)
    return answers


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_child_forked_at_any_moment_makes_groups_of_its_own(hosts: tuple[int, ...]) -> None:
    print(f"SEED {SEED}")
    for turn in range(2):
        for answers in run_ranks(2, fork_at_random, SEED + turn, place=SeparateHosts(hosts=hosts), timeout=180):
            assert answers[0::2] == ["works"] * 3, answers
            assert all("forked process" in answer for answer in answers[1::2]), answers


SCRIPT = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import zeropg

def wait_for(work):
    try:
        work.wait()
    except Exception:  # its text would need the interpreter's end to wait
        pass

rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", {port}, None, False)
dist.init_process_group("zeropg", store=store, rank=rank, world_size=3)
others = dist.new_group([1, 2])
dist.barrier()
if rank == 0:
    pending = [dist.irecv(torch.ones(9), 1), dist.all_reduce(torch.ones(9), async_op=True)]
    kept = torch.ones(1000, requires_grad=True)
    pending[1].get_future().then(lambda done: done.value())
    {ending}
try:
    dist.all_reduce(torch.ones(9))
    dist.recv(torch.ones(9), 0)
except dist.DistBackendError as error:
    print(error)
dist.barrier(others)
print("done", flush=True)
os._exit(0)
"""
ENDINGS = {
    "the end of the script": ("sys.exit(0)", 0),
    "an exception": ("raise ValueError('the reason')", 1),
    "a thread that waits": (
        "threading.Thread(target=wait_for, args=(pending[0],), daemon=True).start(); time.sleep(0.1); sys.exit(0)",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_interpreter_that_ends_without_destroying_its_groups(name: str) -> None:
    ending, expected = ENDINGS[name]
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script = textwrap.dedent(SCRIPT).format(port=store.port, ending=ending)
    with script_on_ranks(script, 3) as ranks:
        outputs = [process.communicate(timeout=90)[0].decode() for process in ranks]
    assert ranks[0].returncode == expected, outputs[0]
    assert expected == 0 or "ValueError: the reason" in outputs[0], outputs[0]
    for rank in (1, 2):
        assert ranks[rank].returncode == 0 and "done" in outputs[rank], outputs[rank]
        assert "rank 0 left the group" in outputs[rank], outputs[rank]


def total_of_a_child(group: Any, name: str) -> None:
    child = group.split_group([0, 1], group_name=name)
    total = torch.ones(1000)
    child.allreduce([total]).wait()
    assert total[0].item() == 2


def make_and_drop(count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    before: Resources | None = None
    for turn in range(count):  # some of them are aborted, fail, are split or have a window
        group: Any = dist.new_group()
        total = torch.ones(1 << (turn % 16))
        work = dist.all_reduce(total, group=group, async_op=True)
        work.wait()
        sent = dist.isend(total, (rank + 1) % size, group=group)
        dist.recv(torch.empty_like(total), (rank - 1) % size, group=group)
        sent.wait()
        if turn % 10 == 9:
            dist.barrier(group)  # nobody needs the other any more
            group.abort()
        elif turn % 10 == 3:
            with contextlib.suppress(dist.DistBackendError):
                dist.all_reduce(torch.ones(1 + rank), group=group)
        elif turn % 10 == 5:
            total_of_a_child(group, f"child{turn}")
        elif turn % 10 == 7 and getattr(group, "supports_window", False):  # torch 2.11 has none
            group.new_window(torch.zeros(1000))
        dist.destroy_process_group(group)
        if turn == count // 4:
            before = held_resources()
    dist.barrier()
    assert before is not None
    expect_no_more_than(before)


@pytest.mark.parametrize(
    ("hosts", "count"), [((0, 0), 200), ((0, 1), 40), pytest.param((0, 1), 200, marks=pytest.mark.soak)]
)
def test_many_groups_leave_nothing_behind(hosts: tuple[int, ...], count: int) -> None:
    run_ranks(2, make_and_drop, count, place=SeparateHosts(hosts=hosts), timeout=120)
