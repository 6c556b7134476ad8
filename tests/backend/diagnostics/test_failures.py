"""What goes wrong between ranks: one clear error on every living rank, in time, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.deadlines import give_seconds, new_group_with
from tests.memory import Resources, expect_no_more_than, held_resources
from tests.spawn import SeparateHosts, run_ranks

Op = dist.ReduceOp


def error_of(call: Callable[[], Any]) -> str:
    try:
        result = call()
        if result is not None:
            result.wait()
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


MISMATCHES: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "sizes": (lambda rank, group: dist.all_reduce(torch.ones(10 + rank), group=group), "rank 0: .*40 bytes.*44 bytes"),
    "dtypes": (
        lambda rank, group: dist.all_reduce(torch.ones(10).to((torch.float32, torch.int32)[rank % 2]), group=group),
        r"ranks 0, 2: all_reduce\(Float.*rank 1: all_reduce\(Int",
    ),
    "operations": (
        lambda rank, group: (
            dist.all_reduce(torch.ones(10), group=group) if rank else dist.broadcast(torch.ones(10), 0, group=group)
        ),
        r"ranks 1, 2: all_reduce\(Float, sum, 40 bytes\); rank 0: broadcast\(Float, root 0, 40 bytes\)",
    ),
    "reductions": (
        lambda rank, group: dist.all_reduce(torch.ones(10), op=Op.MAX if rank == 2 else Op.SUM, group=group),
        "rank 2: all_reduce.*max.*ranks 0, 1: all_reduce.*sum",
    ),
    "roots": (lambda rank, group: dist.broadcast(torch.ones(10), rank, group=group), "root 0.*root 1.*root 2"),
    "factors": (
        lambda rank, group: dist.all_reduce(torch.ones(10), op=dist._make_nccl_premul_sum(1.0 + rank), group=group),
        "with factor 1.*with factor 2",
    ),
    "barrier": (
        lambda rank, group: dist.barrier(group) if rank else dist.all_reduce(torch.ones(1), group=group),
        r"rank 0: all_reduce.*ranks 1, 2: barrier\(\)",
    ),
    "asynchronous": (
        lambda rank, group: dist.all_gather_into_tensor(
            torch.ones(3 + 3 * rank), torch.ones(1 + rank), group=group, async_op=True
        ),
        "4 bytes.*8 bytes",
    ),
    "several chunks": (
        lambda rank, group: dist.all_reduce(torch.ones(1_000_000 * (1 + rank)), group=group),
        "4000000 bytes.*8000000 bytes",
    ),
    "splits": (
        lambda rank, group: (
            dist.all_to_all_single(torch.ones(3 + (rank == 0)), torch.ones(3), [1 + (rank == 0), 1, 1], group=group)
            if rank
            else dist.all_to_all_single(torch.ones(4), torch.ones(3), [1, 2, 1], group=group)
        ),
        "(rank 1|this rank) sends 4 bytes to (rank 0|this rank), which expects 8",
    ),
    "messages": (
        lambda rank, group: (
            dist.send(torch.ones(4), 1, group=group)
            if rank == 0
            else dist.recv(torch.ones(5), 0, group=group)
            if rank == 1
            else dist.all_reduce(torch.ones(1), group=group)
        ),
        "",
    ),
}


def check_mismatches() -> dict[str, tuple[str, str]]:
    """Each on a group of its own, since a group does not survive a mismatch."""
    answers = {}
    for name, (call, _) in MISMATCHES.items():
        group = dist.new_group()
        first = error_of(lambda: call(dist.get_rank(), group))  # noqa: B023
        second = error_of(lambda: dist.all_reduce(torch.ones(1), group=group))  # noqa: B023
        answers[name] = (first, second)
        dist.destroy_process_group(group)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size(), "other groups go on"
    return answers


def test_different_calls_are_one_error_on_every_rank() -> None:
    answers = run_ranks(3, check_mismatches, timeout=60)
    for name, (_, match) in MISMATCHES.items():
        for rank, answer in enumerate(answers):
            first, second = answer[name]
            assert name == "messages" or first.startswith(f"[zeropg rank {rank}/3] "), (name, first)
            assert name == "messages" or re.search(match, first), (name, first)
            assert second != "no error", name
    words = "recv #1 from rank 0 with tag 0 (20 bytes): rank 0 sent 16 bytes, this rank receives 20"
    assert words in answers[1]["messages"][0], answers[1]["messages"]


def only_send() -> dict[str, list[str]]:
    """Calls in which nobody waits for a rank of another node, until the first error."""
    rank = dist.get_rank()
    parts = [torch.full((2,), float(rank)) for _ in range(dist.get_world_size())]
    calls: dict[str, Callable[[Any], Any]] = {
        "broadcast": lambda group: dist.broadcast(torch.full((4,), float(rank)), rank, group=group),
        "scatter": lambda group: dist.scatter(torch.zeros(2), parts, rank, group=group),
        "nothing here": lambda group: dist.all_reduce(torch.ones(10 * (rank % 2)), group=group),
    }
    errors: dict[str, list[str]] = {}
    for name, call in calls.items():
        group = new_group_with(60)  # nobody may wait for that
        start = time.monotonic()
        errors[name] = [error_of(lambda: call(group))]  # noqa: B023
        while errors[name][-1] == "no error" and time.monotonic() < start + 5:
            time.sleep(0.1)
            errors[name].append(error_of(lambda: dist.barrier(group)))  # noqa: B023
        assert time.monotonic() < start + 5
        dist.destroy_process_group(group)
    return errors


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)])
def test_calls_in_which_all_send_and_none_receives_differ_on_every_rank(hosts: tuple[int, ...]) -> None:
    for errors in run_ranks(len(hosts), only_send, place=SeparateHosts(hosts=hosts)):
        assert re.search(r"broadcast\(Float, root \d, 16 bytes\).*root \d", errors["broadcast"][-1]), errors
        assert re.search(r"scatter\(Float, root \d, 8 bytes\).*root \d", errors["scatter"][-1]), errors
        assert re.search("(?=.* 0 bytes)(?=.* 40 bytes)", errors["nothing here"][-1]), errors


MANY = 25  # whose counts do not fit into an announcement


def exchange_among_many(counts: Callable[[int, int], int], wrong: tuple[int, int, int] | None = None) -> torch.Tensor:
    """counts(source, target) elements each, all of the source's rank; `wrong`: what a source really sends a target."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    sent = [wrong[2] if wrong and wrong[:2] == (rank, peer) else counts(rank, peer) for peer in ranks]
    received = [counts(peer, rank) for peer in ranks]
    output = torch.empty(sum(received))
    dist.all_to_all_single(output, torch.full((sum(sent),), float(rank)), received, sent)
    return output


def check_split_mismatch_among_many(wrong: tuple[int, int, int]) -> tuple[str, str]:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())

    def uneven(source: int, target: int) -> int:
        return (source + 2 * target) % 3

    expected = torch.cat([torch.full((uneven(peer, rank),), float(peer)) for peer in ranks])
    assert torch.equal(exchange_among_many(uneven), expected)
    group_errors = []
    for call in (lambda: exchange_among_many(uneven, wrong), lambda: exchange_among_many(lambda *_: 10)):
        try:
            output = call()
            assert len(group_errors) == 0 or torch.equal(output, torch.arange(len(ranks)).repeat_interleave(10).float())
            group_errors.append("no error")
        except dist.DistBackendError as error:
            group_errors.append(str(error))
    return group_errors[0], group_errors[1]


ONE_NODE, TWO_NODES = (0,) * MANY, (0,) * (MANY - 3) + (1,) * 3


@pytest.mark.parametrize(
    ("sent", "hosts"),
    [
        pytest.param(0, TWO_NODES, id="too little-two nodes"),
        pytest.param(900, ONE_NODE, id="too much-one node"),
        pytest.param(0, ONE_NODE, id="too little-one node", marks=pytest.mark.soak),
        pytest.param(900, TWO_NODES, id="too much-two nodes", marks=pytest.mark.soak),
    ],
)
def test_a_split_mismatch_among_many_ranks_does_not_reach_the_next_call(sent: int, hosts: tuple[int, ...]) -> None:
    answers = run_ranks(
        MANY, check_split_mismatch_among_many, (3, 5, sent), timeout=100, place=SeparateHosts(hosts=hosts)
    )
    words = f"rank 3 sends {4 * sent} bytes to this rank, which expects 4; make the splits of both ranks match"
    assert words in answers[5][0], answers[5]
    for rank, (_, second) in enumerate(answers):
        assert "rank 5" in second and words in second, (rank, second)


def stop_or_kill(sign: int, victim: int, call: str) -> tuple[str, float, str, float]:
    """`victim` ends in the middle of `call`; the others say what they saw and after how long."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = new_group_with(30)  # a death is noticed at once, not at the deadline
    dist.barrier(group)
    if rank == victim:
        os.kill(os.getpid(), sign)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(500_000), group=group),
        "asynchronous": lambda: dist.all_reduce(torch.ones(500_000), group=group, async_op=True),
        "receive": lambda: dist.recv(torch.ones(3), victim, group=group),
        "send": lambda: dist.send(torch.ones(1_000_000), victim, group=group),
        "barrier": lambda: dist.barrier(group),
    }
    start = time.monotonic()
    first = error_of(calls[call])
    first_seconds = time.monotonic() - start
    start = time.monotonic()
    second = error_of(calls["all_reduce"])
    second_seconds = time.monotonic() - start
    dist.destroy_process_group(group)
    survivors = [peer for peer in range(size) if peer != victim]
    again = dist.new_group(survivors, use_local_synchronization=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=again)
    assert total.item() == size - 1, "a new group works"
    return first, first_seconds, second, second_seconds


@pytest.mark.parametrize("call", ["all_reduce", "asynchronous", "receive", "send", "barrier"])
def test_a_killed_rank_is_named_at_once(call: str) -> None:
    answers = run_ranks(3, stop_or_kill, signal.SIGKILL, 1, call, expect_death=[1])
    for rank in (0, 2):
        first, seconds, second, at_once = answers[rank]
        assert f"[zeropg rank {rank}/3]" in first, first
        assert "the process of rank 1 died" in first, first
        assert seconds < 15 and at_once < 15, (seconds, at_once)
        assert "died" in second
    assert not [name for name in os.listdir("/dev/shm") if "zeropg" in name]


def stopped_and_continued(call: str) -> Any:
    """Rank 1 stops itself; rank 0 wakes it when the others have their error."""
    rank = dist.get_rank()
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group()
    start = time.monotonic()  # before the barrier: who has passed it finds that all have started
    dist.barrier(group)
    give_seconds(group, 1.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if call == "receive":
        error = error_of(lambda: dist.recv(torch.ones(3), 1, group=group) if rank != 1 else dist.barrier(group))
    else:
        error = error_of(lambda: dist.all_reduce(torch.ones(500_000), group=group, async_op=call == "asynchronous"))
    seconds = time.monotonic() - start
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()  # the world's group has a longer deadline
    return error, seconds


@pytest.mark.parametrize("call", ["all_reduce", "asynchronous", "receive"])
def test_a_stopped_rank_is_named_when_the_deadline_passes(call: str) -> None:
    answers = run_ranks(3, stopped_and_continued, call)
    for rank in (0, 2):
        error, seconds = answers[rank]
        assert error.startswith(f"[zeropg rank {rank}/3]"), error
        assert "timed out after 1500 ms" in error and "rank 1" in error, error
        assert 1.0 < seconds < 20, seconds  # the world would wait for 42 s
    assert "rank" in answers[1][0] and "timed out" in answers[1][0], answers[1]


def stand_still(call: str, seconds: float) -> str:
    """All ranks stop in the middle of a wait for longer than the deadline, as on a virtual machine that gets no CPU."""
    rank = dist.get_rank()
    pids: list[Any] = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group()
    dist.barrier(group)
    give_seconds(group, seconds)
    ranks = " ".join(str(pid) for pid in pids)
    if rank == 0:
        script = f"sleep 0.5; kill -STOP {ranks}; sleep {seconds + 1}; kill -CONT {ranks}"
        subprocess.Popen(["sh", "-c", script], start_new_session=True)
    else:
        time.sleep(1)  # so that rank 0 waits when both stop
    if call == "receive":
        message = dist.irecv if rank == 0 else dist.isend
        return error_of(lambda: message(torch.ones(3), 1 - rank, group=group))
    return error_of(lambda: dist.all_reduce(torch.ones(3), group=group, async_op=call == "asynchronous"))


@pytest.mark.parametrize("call", ["all_reduce", "asynchronous", "receive"])
def test_nobody_is_blamed_when_the_whole_machine_stood_still(call: str) -> None:
    assert run_ranks(2, stand_still, call, 2.5) == ["no error"] * 2


def check_late_rank() -> tuple[str, float]:
    group = new_group_with(1)
    start = time.monotonic()
    if dist.get_rank() == 0:
        error = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        dist.barrier()
        return error, time.monotonic() - start
    dist.barrier()
    return error_of(lambda: dist.all_reduce(torch.ones(3), group=group)), 0.0


def test_a_rank_that_does_not_come_is_named_on_every_rank() -> None:
    (error, seconds), (other, _) = run_ranks(2, check_late_rank)
    assert "[zeropg rank 0/2] all_reduce #1 (12 bytes): timed out after 1000 ms" in error and "rank 1" in error, error
    assert seconds < 20
    assert "[zeropg rank 0/2] all_reduce #1" in other, other


def check_kinds_of_failures() -> tuple[str, str]:
    def kind_after(group: Any, tensor: torch.Tensor) -> str:
        error_of(lambda: dist.all_reduce(tensor, group=group))
        return str(group._get_backend(torch.device("cpu")).get_error().name)

    rank = dist.get_rank()
    group = new_group_with(1)
    if rank == 1:
        dist.barrier()  # which rank 0 calls when its time is up
    late = kind_after(group, torch.ones(3))
    if rank == 0:
        dist.barrier()
    return late, kind_after(dist.new_group(), torch.ones(3 + rank))


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d.Backend, "get_error"), reason="newer than this torch")
def test_a_failure_has_a_kind() -> None:
    assert run_ranks(2, check_kinds_of_failures) == [("TIMEOUT", "COMM_ERROR"), ("REMOTE_ERROR", "COMM_ERROR")]


def check_departed() -> str:
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        dist.barrier()
        return ""
    error = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
    dist.barrier()
    return error


def test_a_rank_that_left_is_named() -> None:
    error = run_ranks(2, check_departed)[0]
    assert "all_reduce #1 (12 bytes): rank 1 left the group" in error, error


def leave_after_its_part(rounds: int) -> list[str]:
    """Whoever has done its part leaves at once, while others still look for what it sent them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    errors = []
    for turn in range(rounds):
        group = dist.new_group()
        splits = [[(3 * source + 5 * target + turn) % 7 * 100 for target in range(size)] for source in range(size)]
        received = [splits[source][rank] for source in range(size)]
        output, sent = torch.empty(sum(received)), torch.ones(sum(splits[rank]))
        errors.append(
            error_of(lambda: dist.all_to_all_single(output, sent, received, splits[rank], group=group, async_op=True))  # noqa: B023
        )
        dist.destroy_process_group(group)
    return errors


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)])
def test_a_rank_that_did_its_part_may_leave(hosts: tuple[int, ...]) -> None:
    for errors in run_ranks(3, leave_after_its_part, 40, place=SeparateHosts(hosts=hosts)):
        assert set(errors) == {"no error"}, errors


def check_abort() -> list[str]:
    group = dist.new_group()
    errors = []
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True) if dist.get_rank() == 0 else None
    receive = dist.irecv(torch.ones(3), 1, group=group) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        start = time.monotonic()
        group.abort()
        assert time.monotonic() - start < 20
        errors += [error_of(lambda: work), error_of(lambda: receive)]
    dist.barrier()
    errors.append(error_of(lambda: dist.barrier(group)))
    dist.destroy_process_group(group)
    again = dist.new_group()
    total = torch.ones(1)
    dist.all_reduce(total, group=again)
    assert total.item() == 2
    return errors


def test_abort_ends_everything_on_both_sides_and_a_new_group_works() -> None:
    mine, other = run_ranks(2, check_abort)
    assert len(mine) == 3 and all("the process group was aborted" in error for error in mine), mine
    assert (
        "[zeropg rank 1/2]" in other[0] and "rank 0 failed: [zeropg rank 0/2] the process group was aborted" in other[0]
    )


def hold_an_aborted_group() -> list[str]:
    """The process's only group, aborted while operations of each kind run and a thread waits for one."""
    from zeropg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    options = _C.BackendOptions()
    options._timeout = timedelta(seconds=60)
    threads = held_resources().threads
    before: Resources | None = None
    errors = []
    for turn in range(4):
        store = dist.PrefixStore(f"turn{turn}", dist.distributed_c10d._get_default_store())
        group = _C.ProcessGroupZero(store, rank, size, options)
        group.barrier().wait()
        works = [group.recv([torch.ones(3)], 1 - rank, 7), group.recv_anysource([torch.ones(3)], 8)]
        called = threading.Event()
        works[0].get_future().add_done_callback(lambda _, called=called: called.set())
        if rank == 0:
            works.append(group.allreduce([torch.ones(1_000_000)]))
        dist.barrier()
        waiter = threading.Thread(target=lambda: error_of(lambda: works[1]))  # noqa: B023
        waiter.start()
        time.sleep(0.1 * turn)
        group.abort()
        waiter.join()
        assert called.wait(30)
        before = before or held_resources()._replace(shared_bytes=0, threads=threads)
        expect_no_more_than(before)  # but the process's doorbell, which stays
        calls: list[Callable[[], Any]] = [
            lambda: group.allreduce([torch.ones(3)]),  # noqa: B023
            lambda: group.send([torch.ones(3)], 1 - rank, 7),  # noqa: B023
            lambda: group.barrier(),  # noqa: B023
            *[lambda work=work: work for work in works],  # type: ignore[misc]
        ]
        errors += [error_of(call) for call in calls]
        group.abort()
        group.shutdown()
        works.clear()  # which have the tensors
        calls.clear()
        dist.barrier()
    return errors


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_an_aborted_group_holds_nothing_though_others_hold_it(hosts: tuple[int, ...]) -> None:
    for errors in run_ranks(2, hold_an_aborted_group, backend="gloo", place=SeparateHosts(hosts=hosts)):
        assert all("aborted" in error for error in errors), errors


def fail_with_hooks() -> list[str]:
    """Rank 1 fails, which rank 0 hears of."""
    group = dist.new_group()
    backend: Any = group._get_backend(torch.device("cpu"))
    assert group.supports_abort_hooks
    heard: list[str] = []
    called = threading.Event()

    def fail() -> None:
        heard.append("fails")
        raise RuntimeError("on purpose")

    def hear() -> None:
        heard.append("hears")
        called.set()

    group.register_abort_hook(1, fail)
    group.register_abort_hook(2, lambda: heard.append("removed"))
    group.register_abort_hook(3, hear)
    group.unregister_abort_hook(2)
    backend.register_abort_hook(4, lambda: heard.append("removed, too"))
    backend.unregister_abort_hook(4)
    assert heard == []
    assert "different calls" in error_of(lambda: dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group))
    assert called.wait(60)
    group.abort()
    dist.destroy_process_group(group)
    return heard


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_abort_hook"), reason="torch 2.11 has no abort hooks")
def test_abort_hooks_are_called_once_when_the_group_fails() -> None:
    assert run_ranks(2, fail_with_hooks) == [["fails", "hears"]] * 2


def check_wait_timeout() -> str:
    if dist.get_rank() == 1:
        dist.barrier()
        dist.all_reduce(torch.ones(3))
        return ""
    group_work = dist.barrier(async_op=True)
    group_work.wait()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    pending = dist.irecv(torch.ones(3), 1)
    error = error_of(lambda: pending.wait(timedelta(milliseconds=100)))
    work.wait()
    return error


def test_a_wait_with_too_little_time_raises_and_the_operation_goes_on() -> None:
    error = run_ranks(2, check_wait_timeout)[0]
    assert "recv #1 from rank 1 with tag 0 (12 bytes): not complete after the 100 ms that wait() was given" in error, (
        error
    )


def check_flight_recorder() -> list[tuple[str, str]]:
    import pickle

    from torch._C._distributed_c10d import _dump_fr_trace

    dist.all_reduce(torch.ones(3))
    gathered = dist.all_gather_into_tensor(torch.ones(4), torch.ones(2), async_op=True)
    assert gathered is not None
    gathered.wait()
    pending = dist.irecv(torch.ones(2), 1 - dist.get_rank())
    entries = pickle.loads(_dump_fr_trace(backend="zeropg"))["entries"][-3:]
    dist.barrier()
    dist.send(torch.ones(2), 1 - dist.get_rank())
    assert pending is not None
    pending.wait()
    return [(entry["profiling_name"], entry["state"]) for entry in entries]


@pytest.mark.skipif(not hasattr(dist.Backend, "_ensure_backend_registered"), reason="torch 2.15 has the hooks for it")
def test_the_flight_recorder_knows_what_is_complete() -> None:
    for names in run_ranks(2, check_flight_recorder):
        states = [state for _, state in names]
        assert states == ["completed", "completed", "scheduled"], names


def init_alone() -> str:
    import zeropg  # noqa: F401

    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    try:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
        store = dist.PrefixStore("alone", dist.distributed_c10d._get_default_store())
        from zeropg import _C

        options = _C.BackendOptions()
        options._timeout = timedelta(seconds=1)
        _C.ProcessGroupZero(store, 0, 2, options)
    except dist.DistBackendError as error:
        dist.barrier()
        return str(error)
    return "no error"


def test_a_group_that_nobody_joins_is_an_error_in_time() -> None:
    error = run_ranks(2, init_alone, backend="gloo")[0]
    assert "rank 1" in error, error


def reduce_by_different_algorithms() -> str:
    import zeropg

    name = "all_reduce_one_shot" if dist.get_rank() == 0 else "all_reduce_staged"
    options = zeropg.backend.BackendOptions(algorithms={"all_reduce": name})
    group = dist.new_group(pg_options=options)
    try:
        dist.all_reduce(torch.ones(1 << 16), group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_ranks_that_run_different_algorithms_are_told() -> None:
    for text in run_ranks(2, reduce_by_different_algorithms, timeout=60):
        assert "another algorithm" in text and "BackendOptions(algorithms=...)" in text, text


def receive_from_who_is_left() -> int | None:
    rank = dist.get_rank()
    if rank == 1:
        dist.destroy_process_group()
        return None
    if rank == 2:
        time.sleep(1)
        dist.send(torch.tensor([2]), 0)
        return None
    received = torch.zeros(1, dtype=torch.int64)
    source = dist.recv(received)
    assert source == received.item()
    return source


def test_a_receive_from_anybody_outlives_a_rank_that_leaves() -> None:
    assert run_ranks(3, receive_from_who_is_left, timeout=60)[0] == 2


def wait_in_a_pair() -> str:
    """Ranks 1 and 3 are the group; rank 3 does not call."""
    pair = dist.new_group([1, 3], timeout=timedelta(seconds=20))
    if dist.get_rank() != 1:
        dist.barrier()
        return ""
    give_seconds(pair, 1.0)
    error = error_of(lambda: dist.all_reduce(torch.ones(1), group=pair))
    dist.barrier()
    return error


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)], ids=["one host", "two hosts"])
def test_an_error_says_which_global_ranks_a_groups_ranks_are(hosts: tuple[int, ...]) -> None:
    error = run_ranks(4, wait_in_a_pair, place=SeparateHosts(hosts=hosts))[1]
    assert error.startswith("[zeropg rank 0/2 of global ranks 1, 3] all_reduce #1"), error
    assert "waiting for rank 1;" in error, error
