"""All-to-all of large ordinary tensors: read from the memory of their ranks, where that is allowed."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests import seccomp
from tests.backend.reference import assert_same, values
from tests.spawn import RankPool, SeparateHosts, run_ranks

LARGE = 20_000  # floats for each rank: more than pays to be read


@dataclass(frozen=True)
class Place(SeparateHosts):
    """Ranks of which some may read nobody's memory."""

    forbidden: tuple[int, ...] = ()

    def enter(self, rank: int) -> None:
        if rank in self.forbidden:
            seccomp.forbid(seccomp.PROCESS_VM_READV)


PLACES = {
    "2 ranks": Place(hosts=(0, 0)),
    "4 ranks": Place(hosts=(0, 0, 0, 0)),
    "3 ranks, one of them may not": Place(hosts=(0, 0, 0), forbidden=(1,)),
    "2 ranks, both may not": Place(hosts=(0, 0), forbidden=(0, 1)),
    "3 ranks on 2 hosts": Place(hosts=(0, 0, 1)),
}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]


@pytest.fixture(scope="module")
def run(place: Place, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(len(place.hosts), place=place).run


def exchange(group: Any, counts: list[list[int]], make: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    """`counts[source][target]`: how much each rank sends to each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [values(peer, sum(counts[peer]), torch.float32) for peer in range(size)]
    received = [counts[peer][rank] for peer in range(size)]
    output = torch.full((sum(received),), -1.0)
    dist.all_to_all_single(output, make(inputs[rank]), received, counts[rank], group=group)
    assert_same(output, torch.cat([inputs[peer].split(counts[peer])[rank] for peer in range(size)]), counts)


def direct_calls(group: Any) -> int:
    return int(zeropg.stats(group)["all_to_all_single"]["direct_calls"])


def check_exchanges(can_read: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    even = [[LARGE] * size] * size
    exchange(group, even)  # finds out who can read whom
    assert direct_calls(group) == 0
    exchange(group, even)
    assert direct_calls(group) == int(can_read)
    uneven = [[LARGE * (1 + (source + 2 * target) % 3) + source for target in range(size)] for source in range(size)]
    exchange(group, uneven)
    assert direct_calls(group) == 2 * int(can_read)
    exchange(group, [[0 if source == 0 else 2 * LARGE] * size for source in range(size)])
    exchange(group, [[1 if target == 0 else LARGE for target in range(size)]] * size)  # rank 0 would not read so little
    exchange(group, [[3] * size] * size)
    assert direct_calls(group) == 2 * int(can_read)

    def in_pool(tensor: torch.Tensor) -> torch.Tensor:
        return zeropg.empty(tensor.shape, dtype=tensor.dtype, group=group).copy_(tensor) if rank == 0 else tensor

    exchange(group, even, in_pool)
    assert direct_calls(group) == 3 * int(can_read)
    exchange(group, even)
    dist.destroy_process_group(group)


def test_counts_of_every_kind(run: Callable[..., Any], place: Place) -> None:
    run(check_exchanges, not place.forbidden and len(set(place.hosts)) == 1)


def check_notice() -> list[str]:
    """What the logger `zeropg` says on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeropg").addHandler(handler)
    group = dist.new_group()
    for _ in range(2):
        exchange(group, [[LARGE] * 2] * 2)
    dist.destroy_process_group(group)
    return lines


def test_whose_memory_cannot_be_read_is_said_once() -> None:
    for rank, lines in enumerate(run_ranks(2, check_notice, place=PLACES["2 ranks, both may not"])):
        assert len(lines) == 1
        assert f"rank {rank}/2] cannot read the memory of rank {1 - rank} (" in lines[0]


def check_option() -> None:
    size = dist.get_world_size()
    for options in (
        zeropg.BackendOptions(cma=False),
        zeropg.BackendOptions(algorithms={"all_to_all": "all_to_all_pairwise"}),
    ):
        group = dist.new_group(pg_options=options)
        for _ in range(3):
            exchange(group, [[LARGE] * size] * size)
        assert direct_calls(group) == 0
        dist.destroy_process_group(group)


def test_options_forbid_it(run: Callable[..., Any]) -> None:
    run(check_option)


def check_options_that_differ() -> None:
    """Rank 0 reads nobody's memory, and others need not read its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(pg_options=zeropg.BackendOptions(cma=rank != 0))

    def in_pool(tensor: torch.Tensor) -> torch.Tensor:
        return zeropg.empty(tensor.shape, dtype=tensor.dtype, group=group).copy_(tensor) if rank == 0 else tensor

    for _ in range(3):
        exchange(group, [[LARGE] * size] * size, in_pool)
    assert direct_calls(group) == 0
    dist.destroy_process_group(group)


def test_a_rank_that_shall_not_read_does_not(run: Callable[..., Any]) -> None:
    run(check_options_that_differ)


def secret(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that the kernel reads for nobody, like that of some devices."""
    memfd_secret = 447
    descriptor = ctypes.CDLL(None).syscall(memfd_secret, 0)
    if descriptor < 0:
        pytest.skip("no memfd_secret here")
    os.ftruncate(descriptor, tensor.nbytes)
    place = torch.frombuffer(mmap.mmap(descriptor, tensor.nbytes), dtype=tensor.dtype)
    os.close(descriptor)
    return place.copy_(tensor)


def check_secret_memory() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    for _ in range(3):
        exchange(group, [[LARGE] * size] * size, secret if rank == 0 else torch.clone)
    assert direct_calls(group) == 0
    dist.destroy_process_group(group)


def test_memory_that_cannot_be_read_goes_through_staging(run: Callable[..., Any]) -> None:
    secret(torch.zeros(1))  # or skip
    run(check_secret_memory)


def check_end() -> str:
    """A rank that may not read any more, after it could."""
    size = dist.get_world_size()
    group = dist.new_group()
    for _ in range(2):
        exchange(group, [[LARGE] * size] * size)
    if dist.get_rank() == 0:
        seccomp.forbid(seccomp.PROCESS_VM_READV)
    try:
        exchange(group, [[LARGE] * size] * size)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_reading_that_is_forbidden_later_is_said_by_every_rank() -> None:
    for text in run_ranks(2, check_end):
        assert "could read the memory of rank 1 and now cannot any more" in text
        assert "BackendOptions(cma=False)" in text


def keep_files_open(seconds: float) -> None:
    """For so long, by another process that shares the table of this one's: its locks outlive it."""
    share_files = 0x400
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    # With the GIL held: the other process has this thread only.
    if ctypes.PyDLL(None).syscall(clone, share_files | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(seconds)
        os._exit(0)


def check_death() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group()
    for _ in range(2):
        exchange(group, [[LARGE] * size] * size)
    if rank == 1:
        room, ones = torch.empty(LARGE * size), torch.ones(LARGE * size)
        dist.all_to_all_single(room, ones, group=group, async_op=True)
        time.sleep(0.5)  # arrives at the first barrier
        keep_files_open(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    try:
        exchange(group, [[LARGE] * size] * size)
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of clone is not known here")
def test_of_a_rank_that_died_it_is_said_even_if_only_its_memory_is_gone() -> None:
    assert "the process of rank 1 died" in run_ranks(2, check_death, expect_death=(1,))[0]
