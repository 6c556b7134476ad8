"""Little room: a small /dev/shm, no locked memory, few descriptors. Groups work or say which limit it was."""

from __future__ import annotations

import ctypes
import os
import random
import resource
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.bare_groups import error_of_a_group
from tests.spawn import SeparateHosts, run_ranks

SEED = random.randrange(1 << 32)
CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x4000 | 0x40000


def libc(function: Callable[[ctypes.CDLL], int], what: str) -> None:
    if function(ctypes.CDLL(None, use_errno=True)) != 0:
        raise OSError(ctypes.get_errno(), what)


def communicate() -> None:
    """More than 64 MiB through shared memory, by every way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 24 << 20
    total = torch.ones(count)
    dist.all_reduce(total)
    assert (total == size).all()
    gathered = torch.empty(size * 1024)
    dist.all_gather_into_tensor(gathered, torch.full((1024,), float(rank)))
    assert gathered[-1].item() == size - 1
    message = torch.full((count,), float(rank))
    if rank == 0:
        dist.send(message, 1)
    elif rank == 1:
        dist.recv(message, 0)
        assert message[-1].item() == 0


def communicate_with_a_small_dev_shm() -> None:
    libc(lambda c: c.unshare(CLONE_NEWNS), "unshare")
    libc(lambda c: c.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "mount")
    libc(lambda c: c.mount(b"small", b"/dev/shm", b"tmpfs", 0, b"size=64m"), "mount")
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    make_the_default_group()
    communicate()
    assert os.listdir("/dev/shm") == []


def make_the_default_group() -> None:
    import zeropg  # noqa: F401

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("zeropg", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_sixty_four_megabytes_of_dev_shm_are_enough() -> None:
    run_ranks(2, communicate_with_a_small_dev_shm, backend=None)


def communicate_without_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    make_the_default_group()
    communicate()


def test_no_memory_need_be_locked() -> None:
    run_ranks(2, communicate_without_locked_memory, backend=None)


def make_groups_with_few_descriptors(victim: int, seed: int, rounds: int) -> list[tuple[int, str]]:
    """`victim` may open `spare` files more than it has open, one round after another."""
    from zeropg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = _C.BackendOptions()
    options._timeout = timedelta(seconds=10)
    answers = []
    for turn in range(rounds):
        spare = chance.randrange(12)
        store = dist.PrefixStore(f"round{turn}", dist.distributed_c10d._get_default_store())
        with ExitStack() as stack:
            if rank == victim:
                highest = max(int(name) for name in os.listdir("/proc/self/fd"))
                while (filler := os.open("/dev/null", os.O_RDONLY)) < highest:  # no holes below the limit
                    stack.callback(os.close, filler)
                stack.callback(os.close, filler)
                resource.setrlimit(resource.RLIMIT_NOFILE, (filler + 1 + spare, limits[1]))
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            error = error_of_a_group(store, options)
        answers.append((spare, error))
        dist.barrier()
    store = dist.PrefixStore("after", dist.distributed_c10d._get_default_store())
    _C.ProcessGroupZero(store, rank, size, options).barrier().wait()
    return answers


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)])
def test_a_limit_of_open_files_is_called_so_on_every_rank(hosts: tuple[int, ...]) -> None:
    victim = random.Random(SEED).randrange(3)
    print(f"victim {victim}, SEED {SEED}")
    place = SeparateHosts(hosts=hosts)
    of_ranks: list[Any] = run_ranks(3, make_groups_with_few_descriptors, victim, SEED, 10, backend="gloo", place=place)
    for answers in zip(*of_ranks, strict=True):
        (spare, own) = answers[victim]
        assert not own or "open files" in own, (spare, own)
        for rank, (_, error) in enumerate(answers):
            assert bool(error) == bool(own), (spare, rank, error, own)
            assert "ZEROPG_SECRET" not in error, (spare, rank, error)
            assert not error or "open files" in error, (spare, rank, error, own)


USER = 54_321  # who runs nothing else


def make_a_group_without_threads(victim: int) -> str:
    """Every rank as another user, since root's limit does not bind; `victim` may start no more threads."""
    import zeropg  # noqa: F401

    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    os.setuid(USER)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("zeropg", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)])
def test_a_limit_of_threads_is_called_so_on_every_rank(hosts: tuple[int, ...]) -> None:
    victim = random.Random(SEED).randrange(3)
    print(f"victim {victim}, SEED {SEED}")
    errors = run_ranks(3, make_a_group_without_threads, victim, backend=None, place=SeparateHosts(hosts=hosts))
    for rank, error in enumerate(errors):
        assert error.startswith(f"[zeropg rank {rank}/3] "), (rank, error)
        assert f"[zeropg rank {victim}/3] the group needs a thread that runs its operations" in error, (rank, error)
        assert "its user may have 1 of processes and threads (ulimit -u)" in error, (rank, error)
