"""Small programs that nobody would write on purpose, beside what plain torch says."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zeropg
from tests.spawn import RankPool, SeparateHosts

Op = dist.ReduceOp
PLACES = {"one node": (0, 0, 0), "two nodes": (0, 1, 0)}


@pytest.fixture(scope="module", params=PLACES)
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    hosts = PLACES[request.param]
    yield rank_pool(len(hosts), place=SeparateHosts(hosts=hosts)).run


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def raw(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Seven elements of random bits; as bytes, since torch cannot copy or compare some dtypes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(
        0, 2 if dtype == torch.bool else 256, (7 * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )


def move_every_dtype_of_torch() -> None:
    rank, size = world()
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    for dtype in sorted(dtypes - quantized, key=str):
        expected = torch.stack([raw(peer, dtype) for peer in range(size)])
        gathered = torch.zeros_like(expected)
        dist.all_gather_into_tensor(gathered.flatten().view(dtype), expected[rank].view(dtype))
        assert gathered.equal(expected), dtype
        exchanged = torch.zeros_like(expected)
        dist.all_to_all_single(exchanged.flatten().view(dtype), expected[rank].repeat(size).view(dtype))
        assert exchanged.equal(expected), dtype
        received = torch.zeros_like(expected[0])
        receive = dist.irecv(received.view(dtype), (rank - 1) % size)
        dist.send(expected[rank].view(dtype), (rank + 1) % size)
        assert receive is not None
        receive.wait()
        assert received.equal(expected[(rank - 1) % size]), dtype


def reduce_infinities_and_nothing() -> None:
    rank, size = world()
    rows = torch.tensor([[math.nan, 1, math.inf, 0.0], [1, math.nan, -math.inf, -0.0], [2, 3, 1, -0.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op, plain in ((Op.MIN, torch.minimum), (Op.MAX, torch.maximum), (Op.SUM, torch.add)):
            for times in (1, 37, 30_011):
                inputs = [rows[peer % 3].to(dtype).repeat(times) for peer in range(size)]
                expected = inputs[0]
                for other in inputs[1:]:
                    expected = plain(expected, other)
                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, op=op)
                torch.testing.assert_close(tensor, expected, equal_nan=True, rtol=0, atol=0)
    for shape in ((), (0,), (3, 0, 2), (1, 1, 1)):
        tensor = torch.ones(shape)
        dist.all_reduce(tensor)
        assert tensor.equal(torch.full(shape, float(size)))
        dist.broadcast(tensor, size - 1)
        parts = [torch.zeros(shape) for _ in range(size)]
        dist.all_gather(parts, torch.full(shape, float(rank)))
        assert all(part.equal(torch.full(shape, float(peer))) for peer, part in enumerate(parts))


def use_tensors_of_inference_mode_and_parameters() -> None:
    _, size = world()
    with torch.inference_mode():
        tensor = torch.ones(3, 4)
        dist.all_reduce(tensor.t())
    dist.all_reduce(tensor[:, ::2])
    assert tensor.eq(torch.tensor([size**2.0, size, size**2.0, size])).all()
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    dist.all_reduce(parameter)
    dist.all_reduce(parameter.t())
    assert parameter.is_leaf and parameter.eq(size**2).all()
    doubled = parameter * 2
    dist.broadcast(doubled.t(), 0)
    doubled.sum().backward()
    assert parameter.grad is not None and parameter.grad.eq(2).all()


def exchange_views_of_one_storage() -> None:
    rank, size = world()
    width = 4 * size
    storages = [torch.arange(width + 3.0) + 100 * peer for peer in range(size)]
    own = storages[rank].clone()
    dist.all_to_all_single(own[:width], own[3:])
    assert own[:width].equal(torch.cat([storage[3:].view(size, 4)[rank] for storage in storages]))
    own = storages[rank].clone()
    dist.all_gather_into_tensor(own[: 3 * size], own[3 * size - 2 :][:3])
    assert own[: 3 * size].equal(torch.cat([storage[3 * size - 2 :][:3] for storage in storages]))
    own = storages[rank].clone()
    dist.reduce_scatter_tensor(own[1:5], own[:width])
    assert own[1:5].equal(sum(storage[:width].view(size, 4)[rank] for storage in storages))
    permuted = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(permuted)
    assert permuted.equal(torch.arange(120.0).view(2, 3, 4, 5) * size)
    ragged = [torch.arange(12.0).view(3, 4).t()[:, ::2] + peer + 100 * rank for peer in range(size)]
    received = [part.t() for part in torch.zeros(size, 2, 4)]
    dist.all_to_all(received, ragged)
    plain = torch.arange(12.0).view(3, 4).t()[:, ::2]
    assert all(part.equal(plain + rank + 100 * peer) for peer, part in enumerate(received))


def overload_one_group_from_several_threads() -> None:
    rank, size = world()
    errors: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            for step in range(12):
                numel = (tag + 1) * 9000 * (1 + step % 3)
                received = torch.empty(numel)
                receive = dist.irecv(received, (rank - 1) % size, tag=tag)
                dist.send(torch.full((numel,), 1000.0 * rank + 100 * tag + step), (rank + 1) % size, tag=tag)
                assert receive is not None
                receive.wait()
                assert received.eq(1000.0 * ((rank - 1) % size) + 100 * tag + step).all()
                ones = torch.ones(5)
                dist.all_reduce(ones)  # the same call in every thread: any order is the right one
                assert ones.eq(size).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def interleave_groups_in_an_order_of_ones_own() -> None:
    rank, size = world()
    groups = [dist.new_group(), dist.new_group(backend="gloo"), dist.new_group(backend="cpu:zeropg"), dist.new_group()]
    for step in range(8):
        order = random.Random(100 * step + rank).sample(range(len(groups)), len(groups))
        tensors = {place: torch.full((10 ** (place + 1),), float(rank + place)) for place in order}
        works = [dist.all_reduce(tensors[place], group=groups[place], async_op=True) for place in order]
        random.Random(step + rank).shuffle(works)
        for work in works:
            work.wait()
        for place, tensor in tensors.items():
            assert tensor.eq(sum(range(size)) + place * size).all()
    for group in groups:
        dist.destroy_process_group(group)


def name_groups_oddly_and_count_their_ranks_backwards() -> None:
    rank, size = world()
    members = [size - 1, 0]
    with torch.no_grad():
        group = dist.new_group(members, group_desc="odd /\\ \n \u2603 " + "x" * 300, timeout=timedelta(days=365 * 250))
    if rank in members:
        gathered = torch.empty(2)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
        assert gathered.tolist() == dist.get_process_group_ranks(group)
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, size - 1, group=group)
        assert tensor.item() == size - 1
    with torch.inference_mode():
        alone = dist.new_group([rank], use_local_synchronization=True)
    tensor, copied = torch.arange(2.0), torch.zeros(2)
    dist.all_reduce(tensor, group=alone)
    dist.all_to_all_single(copied, tensor, group=alone)
    assert copied.tolist() == [0, 1]


def leave_works_behind() -> None:
    rank, size = world()
    for numel in range(0, 15_000, 50):
        dist.all_reduce(torch.ones(numel), async_op=True)
    for numel in range(0, 50_000, 1000):
        dist.isend(torch.ones(numel), (rank + 1) % size)
        dist.irecv(torch.ones(numel), (rank - 1) % size)
    for way in ("destroy", "shutdown", "drop"):
        group = dist.new_group()
        for _ in range(4):
            dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
        if way == "destroy":
            dist.destroy_process_group(group)
        elif way == "shutdown":
            group._get_backend(torch.device("cpu")).shutdown()  # type: ignore[union-attr]
        del group


def raise_between_calls_that_are_coalesced() -> None:
    _, size = world()
    device = torch.device("cpu")
    with pytest.raises(KeyError), dist._coalescing_manager(device=device):
        dist.all_reduce(torch.ones(2))
        raise KeyError
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # which torch leaves as it is
    tensor = torch.ones(3)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(tensor)
    manager.wait()
    assert tensor.eq(size).all()


def handle_signals_and_fork() -> None:
    rank, size = world()
    group = dist.new_group()
    totals = []

    def add_up(*_: Any) -> None:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        totals.append(tensor.tolist())

    previous = signal.signal(signal.SIGUSR2, add_up)
    work = dist.all_reduce(torch.ones(200_000), async_op=True)
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert work is not None
    work.wait()
    if rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    else:
        add_up()
        time.sleep(0.1)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # rank 0 waits here when its handler calls another collective
    assert tensor.eq(size).all() and totals == [[size, size]]
    signal.signal(signal.SIGUSR2, previous)


def take_messages_from_anybody_between_tags() -> None:
    rank, size = world()
    if rank == 0:
        works = [dist.irecv(torch.empty(1), None, tag=1) for _ in range(size - 1)]
        tensors = [torch.empty(3) for _ in range(size - 1)]
        for peer, tensor in enumerate(tensors, 1):
            dist.recv(tensor, peer, tag=2)
        for work in works:
            assert work is not None
            work.wait()
        assert sorted(work._source_rank() for work in works if work is not None) == list(range(1, size))
        assert [tensor[0].item() for tensor in tensors] == list(range(1, size))
        assert {dist.recv(torch.empty(200_000), tag=5) for _ in range(size - 1)} == set(range(1, size))
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=2)
        dist.send(torch.ones(1), 0, tag=1)
        dist.send(torch.ones(200_000), 0, tag=5)


def reduce_sparse_tensors_of_odd_shapes() -> None:
    rank, size = world()
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float16, torch.complex64):
        tensor = torch.sparse_coo_tensor(torch.tensor([[rank, rank, 0]]), torch.tensor([1, 1, 1]).to(dtype), (size,))
        dense = tensor.to_dense()
        dist.all_reduce(dense)
        dist.group.WORLD.allreduce([tensor]).wait()  # type: ignore[union-attr]
        assert tensor.to_dense().equal(dense), dtype
    scalar = torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.int64), torch.tensor([2.5]), ())
    dist.all_reduce(scalar)
    assert scalar.to_dense().item() == 2.5 * size
    nothing = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (5, 4))
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0


def train_unevenly_under_ddp() -> None:
    rank, size = world()

    def is_same_everywhere(tensor: torch.Tensor) -> bool:
        gathered = torch.empty(size, *tensor.shape, dtype=tensor.dtype)
        dist.all_gather_into_tensor(gathered, tensor.contiguous())
        return bool(gathered.eq(gathered[0]).all())

    joined = DistributedDataParallel(torch.nn.Linear(5, 3))
    with joined.join():
        for _ in range(2 + rank):
            joined(torch.ones(2, 5)).sum().backward()
            with torch.no_grad():
                joined.module.weight -= 0.1 * joined.module.weight.grad
            joined.zero_grad()
    assert is_same_everywhere(joined.module.weight.detach())

    class Fork(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
            return self.parts[part](self.parts[0](x))

    fork = DistributedDataParallel(Fork(), find_unused_parameters=True)
    for step in range(3):
        fork.zero_grad()
        fork(torch.ones(2, 4), 1 + (step + rank) % 2).sum().backward()
    assert is_same_everywhere(fork.module.parts[1].weight.grad)
    static = DistributedDataParallel(torch.nn.Linear(4, 4), static_graph=True, gradient_as_bucket_view=True)
    for _ in range(3):
        static(torch.full((2, 4), float(rank))).sum().backward()
    assert is_same_everywhere(static.module.weight.grad)
    complex_ = DistributedDataParallel(torch.nn.Linear(4, 4, dtype=torch.complex64))
    complex_(torch.full((1, 4), 1 + 1j * rank)).abs().sum().backward()
    assert is_same_everywhere(torch.view_as_real(complex_.module.weight.grad))
    convolution = DistributedDataParallel(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    convolution(torch.full((1, 3, 5, 5), float(rank))).sum().backward()
    torch.testing.assert_close(convolution.module.weight.grad, torch.full((4, 3, 3, 3), 9.0 * sum(range(size)) / size))


def compress_what_is_not_finite() -> None:
    from zeropg import _C
    from zeropg.compression import BlockQuant

    rank, size = world()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

    def reduce(tensor: torch.Tensor, codec: BlockQuant) -> None:
        _C.compressed_all_reduce(backend, tensor, codec.make_compressor(), None, [], Op.SUM, async_op=True).wait()

    for numel in (0, 1, 255, 257, 5000):
        tensor = torch.ones(2, numel)[:, ::3]
        reduce(tensor, BlockQuant(8))
        torch.testing.assert_close(tensor, torch.full_like(tensor, float(size)), rtol=0.01, atol=0)
    tensor = torch.ones(600)
    tensor[3] = math.nan if rank == 0 else 1
    tensor[300] = math.inf if rank == size - 1 else 1
    reduce(tensor, BlockQuant(4, 256))
    assert tensor[3].isnan() and tensor[300].isnan()
    gathered = torch.empty(size, 600)
    dist.all_gather_into_tensor(gathered, tensor)
    assert gathered.view(torch.int32).eq(gathered[0].view(torch.int32)).all(), "the same bits everywhere"


PROGRAMS = [
    move_every_dtype_of_torch,
    reduce_infinities_and_nothing,
    use_tensors_of_inference_mode_and_parameters,
    exchange_views_of_one_storage,
    overload_one_group_from_several_threads,
    interleave_groups_in_an_order_of_ones_own,
    name_groups_oddly_and_count_their_ranks_backwards,
    leave_works_behind,
    raise_between_calls_that_are_coalesced,
    handle_signals_and_fork,
    take_messages_from_anybody_between_tags,
    reduce_sparse_tensors_of_odd_shapes,
    train_unevenly_under_ddp,
    compress_what_is_not_finite,
]


def run_and_go_on(program: Callable[[], None]) -> None:
    program()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(dist.get_world_size()).all(), "the group stays usable"
    assert "all_reduce" in zeropg.stats()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_odd_program_gives_what_plain_torch_gives(run: Callable[..., Any], program: Callable[[], None]) -> None:
    run(run_and_go_on, program)
