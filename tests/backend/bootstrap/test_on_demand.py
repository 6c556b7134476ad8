"""Ranks of several nodes that connect on demand: who is connected with whom, and what becomes of those who are gone."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import SeparateHosts, run_ranks
from tests.wires import USABLE_WIRES

THREE_NODES = (0, 0, 0, 1, 1, 1, 2, 2, 2)


def run_on_demand(hosts: tuple[int, ...], function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    env = {"ZEROPG_CONNECTIONS": "on_demand", **options.pop("env", {})}
    return run_ranks(len(hosts), function, *args, place=SeparateHosts(hosts=hosts), env=env, **options)


_ACCEPTED_WITHIN = 1.0  # seconds, on a busy machine; the progress thread looks for callers every 10 ms


def connections() -> int:
    """TCP connections of this process."""
    return sum(is_connected(int(fd)) for fd in os.listdir("/proc/self/fd"))


def is_connected(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            copy.getpeername()
            return copy.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # no socket, no connection, or gone: the one that lists the folder
        return False


def count_connections() -> dict[str, int]:
    from zeropg.backend import BackendOptions

    counts = {}
    dist.barrier()
    for mode in ("all", "on_demand"):
        before = connections()
        group = dist.new_group(pg_options=BackendOptions(connections=mode, measure_links=False))
        counts[mode] = connections() - before
    total = torch.ones(1000)
    dist.all_reduce(total, group=group)
    assert total.eq(9).all()
    dist.barrier()
    time.sleep(_ACCEPTED_WITHIN)
    counts["after"] = connections() - before
    rank = dist.get_rank()
    if rank == 1:
        dist.send(torch.ones(3), 8, group=group)
    elif rank == 8:
        dist.recv(torch.zeros(3), 1, group=group)
    dist.barrier()
    time.sleep(_ACCEPTED_WITHIN)
    counts["message"] = connections() - before
    return counts


def test_a_rank_is_connected_with_those_it_talks_to() -> None:
    counts = run_ranks(len(THREE_NODES), count_connections, place=SeparateHosts(hosts=THREE_NODES))
    assert [each["all"] for each in counts] == [6] * 9
    assert [each["on_demand"] for each in counts] == [2, 0, 0, 1, 0, 0, 1, 0, 0]
    after, with_message = (sum(each[when] for each in counts) for when in ("after", "message"))
    assert 4 < after < 54
    assert with_message - after in (0, 2)


def run_programs(seed: int, steps: int, network: str) -> None:
    """Every pair of ranks, in an order that differs from rank to rank, between collectives of all kinds."""
    from zeropg.backend import BackendOptions

    group = dist.new_group(pg_options=BackendOptions(network=network))
    rank, size = dist.get_rank(), dist.get_world_size()
    same = random.Random(seed)
    for step in range(steps):
        kind = same.choice(["pairs", "all_reduce", "gather", "all_to_all", "anybody"])
        numel = same.choice([1, 77, 40_000])
        root = same.randrange(size)
        if kind == "pairs":
            peers = [peer for peer in range(size) if peer != rank]
            random.Random(seed * 1000 + rank).shuffle(peers)
            received = {peer: torch.zeros(numel) for peer in peers}
            requests = [dist.irecv(received[peer], peer, group=group, tag=step) for peer in peers]
            requests += [
                dist.isend(torch.full((numel,), rank * 100.0 + peer), peer, group=group, tag=step)
                for peer in peers[::-1]
            ]
            for request in requests:
                request.wait()
            for peer in peers:
                assert received[peer].eq(peer * 100 + rank).all()
        elif kind == "all_reduce":
            total = torch.full((numel,), float(rank))
            dist.all_reduce(total, group=group)
            assert total.eq(size * (size - 1) / 2).all()
        elif kind == "gather":
            parts = [torch.zeros(numel) for _ in range(size)] if rank == root else None
            dist.gather(torch.full((numel,), float(rank)), parts, dst=root, group=group)
            assert parts is None or all(part.eq(i).all() for i, part in enumerate(parts))
        elif kind == "all_to_all":
            out = torch.zeros(size * numel)
            dist.all_to_all_single(out, torch.full((size * numel,), float(rank)), group=group)
            assert out.view(size, numel).eq(torch.arange(size).view(-1, 1)).all()
        elif rank == root:
            heard = set()
            for _ in range(size - 1):
                value = torch.zeros(1)
                heard.add(dist.recv(value, group=group, tag=step))
            assert heard == set(range(size)) - {root}
        else:
            dist.send(torch.ones(1), root, group=group, tag=step)


@pytest.mark.parametrize("authentic", ["0", "1"], ids=["plain", "authentic"])
@pytest.mark.parametrize("network", USABLE_WIRES)
def test_random_programs(network: str, authentic: str) -> None:
    hosts = (0, 1, 1, 2, 3)
    run_on_demand(hosts, run_programs, 5, 25, network, env={"ZEROPG_AUTHENTICATE_FRAMES": authentic})


def use_two_groups() -> None:
    one, other = dist.new_group(), dist.new_group()
    first = torch.ones(50_000)
    second = torch.ones(50_000)
    works = [dist.all_reduce(first, group=one, async_op=True), dist.all_reduce(second, group=other, async_op=True)]
    for work in works:
        work.wait()
    assert first.eq(4).all() and second.eq(4).all()
    dist.destroy_process_group(one)
    dist.all_reduce(second, group=other)
    assert second.eq(16).all()


def test_groups_have_connections_of_their_own() -> None:
    run_on_demand((0, 0, 1, 2), use_two_groups)


def lose_one(how: str, network: str) -> str:
    """Rank 3 goes before rank 1 has ever talked to it."""
    from zeropg.backend import BackendOptions

    group = dist.new_group(pg_options=BackendOptions(network=network))
    dist.barrier()
    rank = dist.get_rank()
    if rank == 3 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        dist.destroy_process_group(group)
        time.sleep(8)
        return ""
    if rank != 1:
        time.sleep(8)
        return ""
    time.sleep(1)
    begin = time.monotonic()
    try:
        dist.recv(torch.zeros(1), 3, group=group)
    except dist.DistBackendError as error:
        return f"{time.monotonic() - begin:.1f} s: {error}"
    return "no error"


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("network", USABLE_WIRES)
def test_who_is_gone_before_it_was_called_is_named_soon(network: str, how: str) -> None:
    text = run_on_demand((0, 0, 1, 1), lose_one, how, network, expect_death=(3,) if how == "killed" else ())[1]
    assert float(text.split(" s: ")[0]) < 6, text
    words = {"tcp": "rank 3 left the group (destroyed it or exited)", "ucx": "rank 3 broke (UCX never reached it"}
    assert words[network] in text


def hear_from_whoever_is_left() -> int:
    """Rank 3 leaves while rank 0, which never met it, waits for anybody."""
    group = dist.new_group()
    dist.barrier()
    rank = dist.get_rank()
    sender = -1
    if rank == 0:
        sender = dist.recv(torch.zeros(1), group=group)
    elif rank == 3:
        dist.destroy_process_group(group)
    elif rank == 2:
        time.sleep(4)  # rank 0 has asked for signs of life by then
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()
    return sender


def test_a_receive_from_anybody_outlives_one_that_leaves() -> None:
    assert run_on_demand((0, 0, 1, 1), hear_from_whoever_is_left)[0] == 2


def choose(connections: list[str], network: str) -> str:
    from zeropg.backend import BackendOptions

    try:
        options = BackendOptions(connections=connections[dist.get_rank()], network=network)
        dist.new_group(pg_options=options)
    except (ValueError, dist.DistBackendError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("connections", "words"),
    [
        (["sometimes", "sometimes"], "connections is 'sometimes', expected automatic, all or on_demand"),
        (["all", "on_demand"], "connections is all on rank 0 but on_demand on rank 1; give every rank the same"),
    ],
)
def test_wrong_options_are_one_error_on_every_rank(connections: list[str], words: str) -> None:
    place = SeparateHosts(hosts=(0, 1))
    for text in run_ranks(2, choose, connections, "tcp", place=place):
        assert words in text
