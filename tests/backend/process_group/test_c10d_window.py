"""One-sided access to the memory of other ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.deadlines import give_seconds
from tests.spawn import RankPool, SeparateHosts, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "new_window"), reason="torch 2.11 has no windows")


@pytest.fixture(scope="module")
def run(rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(3).run


def make_window(tensor: torch.Tensor | None, group: Any = None) -> Any:
    return (group or dist.group.WORLD).new_window(tensor)


def put_around() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4, 3), float(rank))
    view = tensor[1]
    window = make_window(tensor)
    assert tensor.eq(rank).all(), "the contents move with the memory"
    dist.barrier()  # the neighbour writes next
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(20):
        window.put(torch.full((3,), 100.0 * rank + step), right, 3, False)
        window.signal(right, False)
        window.wait_signal(left, False)
        assert view.tolist() == [100.0 * left + step] * 3
        window.signal(left, True).wait()  # it was read
        window.wait_signal(right, True).wait()
    assert tensor[0].tolist() == [float(rank)] * 3
    assert window.map_remote_tensor(right)[0].tolist() == [float(right)] * 3
    dist.barrier()
    window.map_remote_tensor(right)[2] = 7.0
    dist.barrier()
    assert tensor[2].tolist() == [7.0] * 3
    assert window.get_attr(left).access_type.name == "UNIFIED"
    window.tensor_deregister()
    tensor += 1  # still usable memory
    assert tensor[2].tolist() == [8.0] * 3


def test_puts_arrive_before_their_signals(run: Callable[..., Any]) -> None:
    run(put_around)


def put_conjugates() -> None:
    tensor = torch.zeros(3, dtype=torch.complex64)
    window = make_window(tensor)
    window.put(torch.full((3,), 1 + 2j).conj(), (dist.get_rank() + 1) % dist.get_world_size(), 0, False)
    dist.barrier()
    assert tensor.tolist() == [1 - 2j] * 3
    window.tensor_deregister()


def test_what_is_put_is_what_the_tensor_shows(run: Callable[..., Any]) -> None:
    run(put_conjugates)


def outlive() -> None:
    group = dist.new_group()
    tensor = torch.arange(4)
    window = make_window(tensor, group)
    remote = window.map_remote_tensor(0)
    dist.barrier(group)
    del window
    dist.destroy_process_group(group)
    assert remote.tolist() == tensor.tolist() == [0, 1, 2, 3]


def test_tensors_outlive_the_window_and_its_group(run: Callable[..., Any]) -> None:
    run(outlive)


def misuse() -> None:
    import numpy

    window = make_window(None)
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="no tensor is registered"):
        window.put(torch.ones(1), 0, 0, False)
    for tensor in (torch.ones(4, 4).t(), torch.from_numpy(numpy.ones(3)), torch.ones(4)[1:]):
        with pytest.raises(ValueError, match=r"contiguous|torch allocated") as caught:
            window.tensor_register(tensor)
        assert str(caught.value).startswith(f"[zeropg rank {rank}/3] tensor_register"), caught.value
    window.tensor_register(torch.zeros(4))
    with pytest.raises(ValueError, match="tensor_deregister"):
        window.tensor_register(torch.zeros(4))
    for tensor, peer, offset, match in (
        (torch.ones(1), 3, 0, "the peer is rank 3, expected 0 to 2"),
        (torch.ones(2), 0, 3, "2 elements at 3 do not fit into a window of 4"),
        (torch.ones(1), 0, -1, "do not fit"),
        (torch.ones(1, dtype=torch.int32), 0, 0, "window's dtype"),
    ):
        with pytest.raises(ValueError, match=match):
            window.put(tensor, peer, offset, False)
    window.tensor_deregister()


def test_wrong_arguments_say_what_was_expected(run: Callable[..., Any]) -> None:
    run(misuse)


def wait_in_threads() -> None:
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    rank = dist.get_rank()
    window = make_window(torch.zeros(2))
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(lambda: [window.wait_signal(rank, True) for _ in range(10_000)]) for _ in range(6)]
    sys.setswitchinterval(switch_interval)
    works = [work for call in calls for work in call.result()]
    for _ in works[1:]:
        window.signal(rank, False)
    assert [work.is_completed() for work in works].count(False) == 1
    window.signal(rank, False)
    assert all(work.is_completed() for work in works)
    window.tensor_deregister()


def test_each_signal_ends_one_wait_of_whatever_thread(run: Callable[..., Any]) -> None:
    run(wait_in_threads)


def wait_for_nobody() -> None:
    group = dist.new_group()
    window = make_window(torch.zeros(2), group)
    give_seconds(group, 1)
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="timed out after 1000 ms waiting for a signal of rank 1"):
            window.wait_signal(1, False)
    dist.barrier()
    if dist.get_rank() == 1:
        window.signal(0, False)
    elif dist.get_rank() == 0:
        give_seconds(group, 60)
        window.wait_signal(1, False)  # the one that came too late


def wait_beside_one_that_gives_up() -> None:
    group = dist.new_group()
    window = make_window(torch.zeros(2), group)
    if dist.get_rank() == 0:
        give_seconds(group, 1)
        unseen = window.wait_signal(1, True)
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(window.wait_signal, 1, False)
            while not first.running():
                time.sleep(0.01)
            time.sleep(0.2)
            give_seconds(group, 60)
            second = threads.submit(window.wait_signal, 1, False)
            with pytest.raises(dist.DistBackendError, match="timed out after 1000 ms waiting for a signal of rank 1"):
                first.result()
            dist.barrier()  # then the peer signals, after each
            with pytest.raises(TimeoutError):
                second.result(timeout=0.5)  # the older wait gets the first
            assert unseen.is_completed()
            dist.barrier()
            second.result()
            third = window.wait_signal(1, True)
            dist.barrier()
            del third
        window.wait_signal(1, False)
    else:
        for _ in range(3):
            dist.barrier()
            window.signal(0, False)
    dist.barrier()
    window.tensor_deregister()


def wait_for_the_dead() -> None:
    window = make_window(torch.zeros(2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        window.wait_signal(1, False)
    assert time.monotonic() - start < 20


def test_a_signal_that_does_not_come_is_an_error(run: Callable[..., Any]) -> None:
    run(wait_for_nobody)
    run(wait_beside_one_that_gives_up)
    run_ranks(2, wait_for_the_dead, expect_death={1})


def differ() -> None:
    rank = dist.get_rank()
    for shape, dtype in (((2 + 1000 * rank,), torch.float32), ((2, 3), (torch.int32, torch.float32)[rank % 2])):
        tensor = torch.zeros(shape, dtype=dtype)
        with pytest.raises(ValueError, match=r"rank \d registers (Int|Float) of shape \[[\d, ]+\], this rank"):
            make_window(tensor)
        assert tensor.eq(0).all()
    with pytest.raises(ValueError, match="register the same dtype and shape on every rank"):
        make_window(torch.zeros((3, 2) if rank else (2, 3)))
    with pytest.raises(dist.DistBackendError, match="allocate_shared"):
        make_window(torch.zeros(2 + 1000 * rank)[:2], dist.new_group())


def test_different_dtypes_shapes_and_storages_are_an_error_on_every_rank(run: Callable[..., Any]) -> None:
    run(differ)


def put_between_nodes() -> None:
    """Large and small ones to everybody at once, each behind the one before it; then signals."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = 700_001
    tensor = torch.zeros(size, numel)
    window = make_window(tensor)
    for step in range(6):
        for peer in range(size):
            window.put(torch.full((numel,), 100.0 * rank + step), peer, rank * numel, False)
            window.put(torch.full((1,), -1.0 - step), peer, rank * numel + 5, step % 2 == 0)
            window.signal(peer, False)
        for peer in range(size):
            window.wait_signal(peer, False)
            assert tensor[peer, 5] == -1 - step
            assert tensor[peer, 6:].eq(100 * peer + step).all() and tensor[peer, :5].eq(100 * peer + step).all()
        dist.barrier()
    for peer in range(size):
        window.put(torch.full((3,), 7.0 + rank), peer, rank * numel, True)
    window.tensor_deregister()  # which waits for them
    assert tensor[:, :3].eq(7 + torch.arange(size).view(-1, 1)).all()


def two_windows_and_threads() -> None:
    """Both ends write from several threads, into two windows of two groups, while a collective runs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.zeros(size, 8, 1000, dtype=torch.int64), torch.zeros(size, 8, 1000, dtype=torch.uint8)]
    windows = [make_window(tensor, group) for tensor, group in zip(tensors, groups, strict=True)]
    total = torch.ones(1 << 22)
    work = dist.all_reduce(total, async_op=True)

    def write(row: int) -> None:
        for window, tensor in zip(windows, tensors, strict=True):
            for peer in range(size):
                value = torch.full((1000,), 10 * rank + row, dtype=tensor.dtype)
                window.put(value, peer, (rank * 8 + row) * 1000, False)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    work.wait()
    assert total.eq(size).all()
    for window, tensor in zip(windows, tensors, strict=True):
        window.tensor_deregister()
        expected = 10 * torch.arange(size).view(-1, 1, 1) + torch.arange(8).view(1, -1, 1)
        assert tensor.eq(expected).all()


def misuse_between_nodes() -> None:
    rank = dist.get_rank()
    assert dist.group.WORLD.supports_window  # type: ignore[union-attr]
    window = make_window(torch.zeros(4))
    elsewhere = 0 if rank == 2 else 2
    with pytest.raises(NotImplementedError, match=f"rank {elsewhere} is on another node, whose"):
        window.map_remote_tensor(elsewhere)
    for values, offset in ((torch.ones(5), 0), (torch.ones(1), 4)):
        with pytest.raises(ValueError, match="do not fit into a window of 4"):
            window.put(values, elsewhere, offset, False)
    group = dist.new_group()
    late = make_window(torch.zeros(4), group)
    give_seconds(group, 1)
    with pytest.raises(dist.DistBackendError, match=r"timed out after 1000 ms waiting for a signal of rank \d"):
        late.wait_signal((rank + 1) % 3, False)
    window.tensor_deregister()


def outlive_between_nodes() -> None:
    """What comes for a window that is gone harms nobody."""
    group = dist.new_group()
    tensor = torch.arange(4)
    window = make_window(tensor, group)
    dist.barrier()
    if dist.get_rank() == 0:
        del window, tensor
    dist.barrier()
    if dist.get_rank() == 2:
        window.put(torch.ones(4, dtype=torch.int64), 0, 0, False)
        window.signal(0, False)
        window.put(torch.full((4,), 9), 1, 0, False)
        window.signal(1, False)
    elif dist.get_rank() == 1:
        window.wait_signal(2, False)
        assert tensor.tolist() == [9] * 4
    dist.barrier(group)


def test_windows_between_nodes() -> None:
    place = SeparateHosts(hosts=(0, 0, 1))
    run_ranks(3, in_turn, put_between_nodes, two_windows_and_threads, misuse_between_nodes, place=place)
    run_ranks(3, outlive_between_nodes, place=place)


def in_turn(*programs: Callable[[], None]) -> None:
    for program in programs:
        program()


def lose_a_host() -> str:
    window = make_window(torch.zeros(1 << 20))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while time.monotonic() - start < 30:
            window.put(torch.ones(1 << 20), 1, 0, False)
    except dist.DistBackendError as error:
        return f"{time.monotonic() - start:.0f} s: {error}"
    return "no error"


def test_a_put_to_a_rank_that_died_names_it() -> None:
    text = run_ranks(2, lose_a_host, place=SeparateHosts(hosts=(0, 1)), expect_death=(1,))[0]
    assert "put" in text and "rank 1" in text, text
    assert float(text.split(" s: ")[0]) < 10
