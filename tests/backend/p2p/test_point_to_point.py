"""Sends and receives: order, tags, sizes, any source, batches."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import seccomp
from tests.backend.reference import MOVABLE, assert_same, values
from tests.spawn import RankPool, SeparateHosts, run_ranks

LARGE = 700_001  # ten times a mailbox, and large enough to be read from the sender's memory


@dataclass(frozen=True)
class WithoutCma(SeparateHosts):
    """Ranks that may not read each other's memory."""

    def enter(self, rank: int) -> None:
        seccomp.forbid(seccomp.PROCESS_VM_READV)


PLACES = {
    "2 ranks": SeparateHosts(hosts=(0, 0)),
    "2 ranks without cma": WithoutCma(hosts=(0, 0)),
    "3 ranks": SeparateHosts(hosts=(0, 0, 0)),
    "3 ranks on 2 hosts": SeparateHosts(hosts=(0, 0, 1)),
}


@pytest.fixture(scope="module", params=PLACES)
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    place = PLACES[request.param]
    yield rank_pool(len(place.hosts), place=place).run


def ring() -> tuple[int, int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def receive_what_was_set_aside() -> list[float]:
    large, small = torch.ones(16 << 20), torch.ones(1)
    shares = []
    for _ in range(7):
        if dist.get_rank() == 0:
            works = [dist.isend(large, 1, tag=1), dist.isend(small, 1, tag=2)]
        else:
            dist.recv(small, 0, tag=2)  # the large one, which came before it, is set aside
            start = time.monotonic()
            works = [dist.irecv(large, 0, tag=1)]
            calling = time.monotonic() - start
        for work in works:
            assert work is not None
            work.wait()
        if dist.get_rank() == 1:
            shares.append(calling / (time.monotonic() - start))
    return shares


def test_posting_a_large_receive_does_not_wait_for_its_bytes(rank_pool: Callable[..., RankPool]) -> None:
    shares = rank_pool(2).run(receive_what_was_set_aside)[1]
    assert statistics.median(shares) < 0.5, f"these shares of the time were spent in the call: {shares}"


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


def check_window_of_one_thread() -> None:
    rank, after, before = ring()
    group, device = dist.group.WORLD, torch.device("cpu")
    backend = group._get_backend(device)  # type: ignore[union-attr]
    received, sums = torch.zeros(3), torch.ones(3)

    def exchange() -> None:
        works = [backend.recv([received], before, 5), backend.send([torch.full((3,), float(rank))], after, 5)]
        for work in works:
            work.wait()

    backend._start_coalescing()
    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()
    assert received.eq(before).all()
    backend.allreduce([sums])
    work = backend._end_coalescing()
    work.wait()
    assert sums.eq(dist.get_world_size()).all()
    assert len(work.result()) == 1, "calls of another thread are not in the window"


def test_a_coalescing_window_is_its_threads_own(run: Callable[..., Any]) -> None:
    run(check_window_of_one_thread)


def test_a_coalescing_window_ends_with_one_work(run: Callable[..., Any]) -> None:
    run(check_window)


def check_error_in_window() -> None:
    """As in batch_isend_irecv where NCCL is there."""
    rank, after, before = ring()
    received = torch.zeros(3)
    with (
        pytest.raises(ValueError, match="cannot send to or receive from itself"),
        dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True),
    ):
        receive = dist.irecv(received, before)
        with pytest.raises(ValueError, match="cannot send to or receive from itself"):
            dist.isend(torch.ones(3), rank).wait()  # type: ignore[union-attr]
        dist.isend(torch.full((3,), float(rank)), after)
    receive.wait()  # type: ignore[union-attr]
    assert received.eq(before).all()
    sums = torch.ones(3)
    dist.all_reduce(sums)
    assert sums.eq(dist.get_world_size()).all(), "torch has only noted it"


def test_what_is_wrong_in_a_coalescing_window_is_said_at_its_end(run: Callable[..., Any]) -> None:
    run(check_error_in_window)


def check_dtypes_that_differ(numel: int, is_set_aside: bool) -> None:
    group = dist.new_group()
    rank = dist.get_rank()
    if rank == 0:
        with contextlib.suppress(dist.DistBackendError):  # the receiver may have failed the group between the two
            dist.isend(torch.ones(numel, dtype=torch.int32), 1, group=group, tag=1)
            dist.isend(torch.ones(1), 1, group=group, tag=2)
    elif rank == 1:
        if is_set_aside:
            dist.recv(torch.ones(1), 0, group=group, tag=2)
        with pytest.raises(
            dist.DistBackendError, match=r"recv .*: rank 0 sent Int, this rank receives Float; make both"
        ):
            dist.recv(torch.ones(numel), 0, group=group, tag=1)
    dist.barrier()


@pytest.mark.parametrize("is_set_aside", [False, True], ids=["wanted", "set aside"])
@pytest.mark.parametrize("numel", [1, LARGE])
def test_a_message_of_another_dtype_is_an_error(run: Callable[..., Any], numel: int, is_set_aside: bool) -> None:
    run(check_dtypes_that_differ, numel, is_set_aside)


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


def check_large_messages(way: str) -> None:
    """Unwanted ones are set aside, whichever way they come; sizes around the limit."""
    import zeropg

    rank, after, before = ring()
    group = dist.new_group(pg_options=zeropg.BackendOptions(cma=way == "cma"))

    def sent(numel: int) -> torch.Tensor:
        tensor = values(rank, numel, torch.float32)
        return zeropg.empty(numel, group=group).copy_(tensor) if way == "pool" else tensor

    for numel in (65_535, 65_536, 65_537, LARGE):
        first, second = torch.zeros(numel), torch.zeros(3)
        sends = [
            dist.isend(sent(numel), after, group, tag=1),
            dist.isend(torch.full((3,), float(rank)), after, group, tag=2),
        ]
        dist.recv(second, before, group, tag=2)
        dist.recv(first, before, group, tag=1)
        for work in sends:
            assert work is not None
            work.wait()
        assert_same(first, values(before, numel, torch.float32), numel)
        assert (second == before).all()


@pytest.mark.parametrize("way", ["cma", "pool", "ring"])
def test_large_messages_that_nobody_wants_yet(run: Callable[..., Any], way: str) -> None:
    run(check_large_messages, way)


def check_behind_a_full_ring() -> None:
    """A large message whose first bytes find no room at all, with nothing of another one in their way."""
    rank, after, before = ring()
    header_bytes, ring_bytes = 16, 256 << 10
    sizes = [(ring_bytes - header_bytes) // 4, LARGE]
    sends = [dist.isend(values(rank, numel, torch.float32), after) for numel in sizes]
    time.sleep(0.2)
    for numel in sizes:
        received = torch.zeros(numel)
        dist.recv(received, before)
        assert_same(received, values(before, numel, torch.float32), numel)
    for work in sends:
        assert work is not None
        work.wait()


def test_a_large_message_behind_a_full_ring(run: Callable[..., Any]) -> None:
    run(check_behind_a_full_ring)


def check_refusal() -> list[str]:
    """What the logger `zeropg` says on this rank."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeropg").addHandler(handler)
    for _ in range(3):
        check_large_messages("cma")
    return lines


def test_a_refused_read_is_said_once() -> None:
    for rank, lines in enumerate(run_ranks(2, check_refusal, place=WithoutCma(hosts=(0, 0)))):
        assert len(lines) == 1
        assert re.search(rf"rank {rank}/2\] cannot read the memory of rank {1 - rank} \(.*not permitted\)", lines[0])
    assert run_ranks(2, check_refusal) == [[], []]


LATE_SECONDS = 0.3


def wait_for_messages(any_source: bool) -> dict[str, list[float]]:
    """How long this rank waited for which one, by operation; rank 1 is late in sending, and then in receiving."""
    import zeropg

    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    large = torch.ones(2_000_000)  # more than a window between hosts
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(1), None if any_source else 1, group=group)
        store.set(f"posted {any_source}", "")
        assert work is not None
        work.wait()
        dist.send(large, 1, group=group)
    elif dist.get_rank() == 1:
        store.wait([f"posted {any_source}"])
        time.sleep(LATE_SECONDS)
        dist.send(torch.ones(1), 0, group=group)
        time.sleep(LATE_SECONDS)
        dist.recv(large, 0, group=group)
    dist.barrier(group)
    return {name: counters["waiting_seconds"] for name, counters in zeropg.stats(group).items()}


@pytest.mark.parametrize("any_source", [False, True])
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)])
def test_statistics_say_for_whom_messages_waited(hosts: tuple[int, ...], any_source: bool) -> None:
    waited = run_ranks(3, wait_for_messages, any_source, place=SeparateHosts(hosts=hosts))
    received = waited[0]["recvAnySource" if any_source else "recv"]
    assert received[1] >= LATE_SECONDS and received[0] == received[2] == 0, received
    sent = waited[0]["send"]
    assert sent[1] > 0 and sent[0] == sent[2] == 0, sent


def die_while_it_is_read(seconds: float) -> str:
    rank = dist.get_rank()
    tensor = torch.ones(32 << 20)
    dist.barrier()
    if rank == 1:
        dist.isend(tensor, 0)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(2):
            dist.recv(tensor, 1)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02])
def test_a_sender_that_dies_while_it_is_read_is_named(seconds: float) -> None:
    text = run_ranks(2, die_while_it_is_read, seconds, expect_death={1})[0]
    assert re.search(r"rank 0/2\] recv .*rank 1 died", text), text


def run_out_of_memory() -> str:
    rank = dist.get_rank()
    if rank == 1:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    dist.barrier()
    with pytest.raises(dist.DistBackendError) as caught:
        if rank == 0:
            works = [dist.isend(torch.ones(40 << 20), 1, tag=4), dist.isend(torch.ones(4), 1, tag=5)]
            for work in works:
                assert work is not None
                work.wait()
        else:
            dist.recv(torch.ones(4), 0, tag=5)
    return str(caught.value)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_message_that_there_is_no_memory_for_is_named(hosts: tuple[int, ...]) -> None:
    for text in run_ranks(2, run_out_of_memory, place=SeparateHosts(hosts=hosts)):
        assert "no memory left for a message of 167772160 bytes from rank 0 with tag 4" in text, text


def leave_with_a_receive_that_nobody_serves() -> float:
    group = dist.new_group()
    for peer in (1 - dist.get_rank(), None):
        dist.irecv(torch.ones(3), peer, group=group)
    start = time.monotonic()
    dist.destroy_process_group(group)
    return time.monotonic() - start


def test_receives_that_nobody_serves_keep_no_group_from_ending() -> None:
    assert max(run_ranks(2, leave_with_a_receive_that_nobody_serves)) < 4  # 1.0 where nobody else runs


def interrupt_waits() -> float:
    """Seconds that the later one of two handlers was late."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"])
        dist.send(torch.ones(1), 0)
        dist.barrier()  # the one that rank 0 gave up waiting for goes on
        dist.recv(torch.ones(1), 0)
        return 0.0

    rung: list[float] = []

    def interrupt(*_: object) -> None:
        rung.append(time.monotonic())
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    late = 0.0
    for wait in (lambda: dist.recv(torch.ones(1), 1), dist.barrier):
        with pytest.raises(KeyboardInterrupt):
            due = time.monotonic() + 0.3
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            wait()
        late = max(late, rung[-1] - due)
    store.set("interrupted", "")
    dist.send(torch.ones(1), 1)
    return late


def test_a_signal_interrupts_a_wait_and_the_operation_goes_on() -> None:
    assert run_ranks(2, interrupt_waits)[0] < 15  # 0.05 where nobody else runs; the deadline is 42 away


def receive_while_one_sender_is_stopped(elements: int) -> list[tuple[int, float]]:
    """Rank 1 stops in the middle of a message; rank 2 sends two with its tag, and another one between them."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("stopped", str(os.getpid()))
        sent = [dist.isend(torch.full((elements,), 10.0), 0, tag=1)]
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 2:
        store.get("go on")
        sent = [dist.isend(torch.full((elements,), value), 0, tag=tag) for value, tag in ((1.0, 1), (0.0, 9), (2.0, 1))]
    if rank > 0:
        for work in sent:
            work.wait()
        return []
    behind = dist.irecv(torch.empty(elements), tag=9)
    stopped = int(store.get("stopped"))
    time.sleep(0.3)
    store.set("go on", "")
    behind.wait()
    time.sleep(0.2)  # the next one is at the door
    received = []
    try:
        for _ in range(3):
            message = torch.empty(elements)
            work = dist.irecv(message, tag=1)
            deadline = time.monotonic() + 1
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not work.is_completed():
                os.kill(stopped, signal.SIGCONT)  # nothing of rank 2 is left
            work.wait()
            assert message.eq(message[0]).all()
            received.append((work._source_rank(), message[0].item()))
    finally:
        os.kill(stopped, signal.SIGCONT)
    return received


def test_a_message_that_is_coming_in_lets_nobody_overtake() -> None:
    received = run_ranks(3, receive_while_one_sender_is_stopped, 5_000_000, place=SeparateHosts(hosts=(0, 1, 2)))[0]
    assert [value for source, value in received if source == 2] == [1.0, 2.0]
    assert sorted(received) == [(1, 10.0), (2, 1.0), (2, 2.0)]
