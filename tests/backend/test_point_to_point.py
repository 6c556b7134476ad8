"""Sends and receives: order, tags, sizes, any source, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.backend.reference import MOVABLE, assert_same, values
from tests.spawn import RankPool, SeparateHosts

LARGE = 700_001  # ten times a mailbox


@pytest.fixture(scope="module", params=[(0, 0), (0, 0, 0), (0, 0, 1)], ids=str)  # the host of each rank
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(len(request.param), place=SeparateHosts(hosts=request.param)).run


def ring() -> tuple[int, int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def check_dtypes() -> None:
    rank, after, before = ring()
    for dtype in MOVABLE:
        for numel in (0, 1, 1003, *((LARGE,) if dtype == torch.float32 else ())):
            received = torch.empty(numel, dtype=dtype)
            work = dist.irecv(received, before, tag=3)
            dist.send(values(rank, numel, dtype), after, tag=3)
            assert work is not None and work.wait()
            assert_same(received, values(before, numel, dtype), (dtype, numel))


def test_send_and_receive_any_dtype_and_size(run: Callable[..., Any]) -> None:
    run(check_dtypes)


def check_everybody_sends_first() -> None:
    rank, after, before = ring()
    sends = [dist.isend(values(rank, LARGE, torch.float32, i), after, tag=i) for i in range(3)]
    received = [torch.empty(LARGE) for _ in range(3)]
    receives = [dist.irecv(received[i], before, tag=i) for i in (2, 0, 1)]
    for work in (*receives, *sends):
        assert work is not None and work.wait()
    for i in range(3):
        assert_same(received[i], values(before, LARGE, torch.float32, i), i)


def test_large_sends_before_any_receive_and_tags_out_of_order(run: Callable[..., Any]) -> None:
    run(check_everybody_sends_first)


def check_order_of_one_tag() -> None:
    _, after, before = ring()
    sends = [dist.isend(torch.tensor([i]), after) for i in range(100)]
    for i in range(100):
        received = torch.empty(1, dtype=torch.int64)
        dist.recv(received, before)
        assert received.item() == i
    for work in sends:
        assert work is not None
        work.wait()


def test_messages_of_one_tag_keep_their_order(run: Callable[..., Any]) -> None:
    run(check_order_of_one_tag)


def check_any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(torch.tensor([rank]), 0, tag=9)
        return
    seen = set()
    for _ in range(size - 1):
        received = torch.empty(1, dtype=torch.int64)
        source = dist.recv(received, tag=9)
        assert source == received.item()
        seen.add(source)
    assert seen == set(range(1, size))


def test_receive_from_anybody_says_from_whom(run: Callable[..., Any]) -> None:
    run(check_any_source)


def check_batch() -> None:
    rank, after, before = ring()
    received = torch.empty(1003)
    sent = values(rank, 1003, torch.float32)
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same(received, values(before, 1003, torch.float32), "batch")


def test_batched_sends_and_receives(run: Callable[..., Any]) -> None:
    run(check_batch)


def check_window() -> None:
    """What torch does around a batch where NCCL is there."""
    rank, after, before = ring()
    received = torch.empty(1003)
    group, device = dist.group.WORLD, torch.device("cpu")
    group._start_coalescing(device)
    dist.irecv(received, before)
    dist.isend(values(rank, 1003, torch.float32), after)
    work = group._end_coalescing(device)
    work.wait()
    assert work.is_completed()
    assert_same(received, values(before, 1003, torch.float32), "window")
    group._start_coalescing(device)
    group._end_coalescing(device).wait()


def test_a_coalescing_window_ends_with_one_work(run: Callable[..., Any]) -> None:
    run(check_window)


def check_beside_collectives() -> None:
    rank, after, before = ring()
    received = torch.empty(4)
    receive = dist.irecv(received, before)
    total = torch.ones(50_000)
    reduction = dist.all_reduce(total, async_op=True)
    dist.barrier()  # a posted receive does not hold up collectives
    dist.send(torch.full((4,), float(rank)), after)
    assert receive is not None and reduction is not None
    receive.wait()
    reduction.wait()
    assert (received == before).all() and (total == dist.get_world_size()).all()


def test_messages_and_collectives_do_not_wait_for_each_other(run: Callable[..., Any]) -> None:
    run(check_beside_collectives)


def check_strided() -> None:
    rank, after, before = ring()
    columns = torch.zeros(5, 2)
    receive = dist.irecv(columns[:, 0], before)
    dist.send(torch.full((5, 2), float(rank + 1))[:, 1], after)
    assert receive is not None
    receive.wait()
    assert (columns[:, 0] == before + 1).all() and not columns[:, 1].any()


def test_strided_messages(run: Callable[..., Any]) -> None:
    run(check_strided)
