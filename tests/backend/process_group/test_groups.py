"""Groups: subgroups, several at once, object collectives, making and destroying, forking, leaving."""

from __future__ import annotations

import os
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import script_on_ranks
from tests.spawn import RankPool, SeparateHosts, run_ranks


@pytest.fixture(scope="module", params=[(0, 0), (0, 0, 0, 0), (0, 0, 1, 1)], ids=str)  # the host of each rank
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(len(request.param), place=SeparateHosts(hosts=request.param)).run


def check_subgroups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    half = size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))]
    mine = groups[rank // half]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mine)
    members = range(half) if rank < half else range(half, size)
    assert total.item() == sum(members)
    root = torch.tensor([float(rank)])
    dist.broadcast(root, src=members[-1], group=mine)
    assert root.item() == members[-1]
    dist.barrier()
    dist.destroy_process_group(mine)


def test_subgroups_with_new_group(run: Callable[..., Any]) -> None:
    run(check_subgroups)


def check_opposite_order() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    for _ in range(20):
        tensors = [torch.full((5000,), float(i + 1)) for i in range(3)]
        order = range(3) if rank % 2 == 0 else range(2, -1, -1)
        works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
        for work in works:
            assert work is not None
            work.wait()
        for i in range(3):
            assert (tensors[i] == (i + 1) * size).all()
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_used_in_opposite_order_on_different_ranks(run: Callable[..., Any]) -> None:
    run(check_opposite_order)


def check_threads() -> None:
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    failures: list[BaseException] = []

    def work(group: Any) -> None:
        try:
            for i in range(50):
                tensor = torch.full((100 * (i % 7),), float(i))
                dist.all_reduce(tensor, group=group)
                assert (tensor == i * size).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for group in groups:
        dist.destroy_process_group(group)


def test_one_group_per_thread(run: Callable[..., Any]) -> None:
    run(check_threads)


def check_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (100 * rank)})
    assert [item["rank"] for item in gathered] == list(range(size))
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=size - 1)
    assert shared == [f"from {size - 1}", size - 1]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [(peer,) for peer in range(size)] if rank == 0 else None, src=0)
    assert mine == [(rank,)]
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, collected, dst=0)
    assert collected is None or collected == list(range(size))
    if rank == 0:
        dist.send_object_list(["hello"], dst=1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, src=0)
        assert received == ["hello"]


def test_object_collectives(run: Callable[..., Any]) -> None:
    run(check_objects)


def check_functional() -> None:
    import torch.distributed._functional_collectives as funcol

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert (funcol.all_reduce(torch.ones(4), "sum", group) + 0 == size).all()
    gathered = funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert (gathered + 0).tolist() == [float(peer) for peer in range(size) for _ in range(2)]
    scattered = funcol.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, group)
    assert (scattered + 0).tolist() == [1.0, 1.0]


def test_functional_collectives(run: Callable[..., Any]) -> None:
    run(check_functional)


def resources() -> tuple[int, int, int]:
    maps = Path("/proc/self/maps").read_text().count("memfd")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps


def check_many_groups() -> None:
    size = dist.get_world_size()
    before = None
    for i in range(50):
        group = dist.new_group()
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        assert (tensor == size * size).all()
        dist.destroy_process_group(group)
        if i == 4:
            before = resources()
    dist.barrier()
    assert before is not None
    after = resources()
    deadline = time.monotonic() + 10  # the threads of the last groups may still be at it
    while any(new > old for new, old in zip(after, before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)
        after = resources()
    assert all(new <= old for new, old in zip(after, before, strict=True)), f"{before} became {after}"


def test_fifty_groups_leave_no_descriptor_thread_or_mapping(run: Callable[..., Any]) -> None:
    run(check_many_groups)


def check_dev_shm() -> None:
    assert not [name for name in os.listdir("/dev/shm") if "zeropg" in name]


def test_nothing_is_named_in_dev_shm(run: Callable[..., Any]) -> None:
    run(check_dev_shm)


def check_fork() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    awaited = dist.irecv(torch.ones(3), (rank - 1) % size)
    assert awaited is not None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: dist.all_reduce(torch.ones(3)), awaited.wait):
            try:
                call()
                answer = "no error\n"
            except Exception as error:
                answer = str(error) + "\n"
            os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    answers = os.read(reader, 10_000).decode().splitlines()
    assert len(answers) == 2 and all("forked process" in answer for answer in answers), answers
    dist.send(torch.ones(3), (rank + 1) % size)
    awaited.wait()
    dist.barrier()  # the parent's group is none the worse


def test_a_forked_child_is_told_to_make_its_own_group(run: Callable[..., Any]) -> None:
    run(check_fork)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import zeropg

store = dist.TCPStore("127.0.0.1", {port}, None, False)
dist.init_process_group("zeropg", store=store, rank=int(sys.argv[1]), world_size=2)
tensor = torch.ones(100_000, requires_grad=True).detach().requires_grad_()
work = dist.all_reduce(torch.ones(1000), async_op=True)
work.get_future().then(lambda done: done.value()[0].sum().item())
dist.barrier()
{ending}
print("done")
"""


@pytest.mark.parametrize("ending", ["dist.destroy_process_group()", "dist.all_reduce(torch.ones(9), async_op=True)"])
def test_a_script_exits_cleanly_with_or_without_destroying_the_group(ending: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script = textwrap.dedent(SCRIPT).format(port=store.port, ending=ending)
    with script_on_ranks(script, 2) as ranks:
        for process in ranks:
            output = process.communicate(timeout=60)[0].decode()
            assert process.returncode == 0 and "done" in output, output


def check_secret_file(path: str) -> float:
    import zeropg  # noqa: F401

    os.environ["ZEROPG_SECRET_FILE"] = path
    group = dist.new_group(backend="zeropg")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def test_the_secret_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("correct horse battery staple\n")
    path.chmod(0o600)
    assert run_ranks(2, check_secret_file, str(path), backend="gloo") == [2, 2]
    path.chmod(0o644)
    with pytest.raises(AssertionError, match="accessible by other users"):
        run_ranks(2, check_secret_file, str(path), backend="gloo")
    os.mkfifo(tmp_path / "pipe", mode=0o600)
    with pytest.raises(AssertionError, match="pipe is not a regular file"):
        run_ranks(2, check_secret_file, str(tmp_path / "pipe"), backend="gloo")
