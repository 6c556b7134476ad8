"""Tensors in shared memory (`zeropg.empty`): the same bits as elsewhere, wherever each rank's tensor lies."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.process_group.test_collectives import reductions
from tests.backend.reference import FLOATS, MOVABLE, assert_same, reduced, values
from tests.spawn import RankPool, run_ranks

LARGE = 400_003
MOVED = (1, 1003, LARGE)
FORCED = {op: f"{op}_direct" for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(request.param).run


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def new_group(**options: Any) -> Any:
    """A group whose direct algorithms run for every size, where the tensors allow it."""
    import zeropg

    return dist.new_group(backend="zeropg", pg_options=zeropg.BackendOptions(algorithms=FORCED, **options))


def in_pool(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    import zeropg

    return zeropg.empty(tensor.shape, dtype=tensor.dtype, group=group).copy_(tensor)


def direct_calls(group: Any, name: str) -> int:
    import zeropg

    return int(zeropg.stats(group).get(name, {}).get("direct_calls", 0))


def check_all_reduce() -> None:
    rank, size = world()
    group = new_group()
    cases = 0
    for case, (dtype, op, numel) in enumerate(reductions()):
        inputs = [values(peer, numel, dtype, case) for peer in range(size)]
        tensor = in_pool(inputs[rank], group)
        dist.all_reduce(tensor, op=op, group=group)
        assert_same(tensor, reduced(inputs, op), (dtype, op, numel))
        cases += numel > 0  # torch says of an empty tensor that it lies nowhere
    for dtype in FLOATS:
        inputs = [values(peer, 1003, dtype) for peer in range(size)]
        tensor = in_pool(inputs[rank], group)
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.25), group=group)
        assert_same(tensor, reduced(inputs, dist.ReduceOp.PREMUL_SUM, 0.25), dtype)
        cases += 1
    assert direct_calls(group, "all_reduce") == (cases if size > 1 else 0)
    dist.destroy_process_group(group)


def test_all_reduce_gives_the_same_bits_for_every_dtype_and_operation(run: Callable[..., Any]) -> None:
    run(check_all_reduce)


def check_reduce_scatter() -> None:
    rank, size = world()
    group = new_group()
    cases = 0
    for case, (dtype, op, numel) in enumerate(reductions()):
        inputs = [values(peer, numel * size, dtype, case) for peer in range(size)]
        expected = reduced([tensor.view(size, numel)[rank] for tensor in inputs], op)
        source = in_pool(inputs[rank], group)
        output = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(output, source, op=op, group=group)
        assert_same(output, expected, (dtype, op, numel))
        assert_same(source, inputs[rank], "the input is left as it was")
        mine = source.narrow(0, rank * numel, numel)  # in place
        dist.reduce_scatter_tensor(mine, source, op=op, group=group)
        assert_same(mine, expected, (dtype, op, numel, "in place"))
        cases += 2 * (numel > 0)
    assert direct_calls(group, "reduce_scatter_tensor") == (cases if size > 1 else 0)
    dist.destroy_process_group(group)


def test_reduce_scatter_out_of_place_and_in_place(run: Callable[..., Any]) -> None:
    run(check_reduce_scatter)


def check_movements() -> None:
    rank, size = world()
    group = new_group()
    for case, (dtype, numel) in enumerate((dtype, numel) for dtype in MOVABLE for numel in MOVED):
        blocks = [values(peer, numel, dtype, case) for peer in range(size)]
        output = torch.empty(numel * size, dtype=dtype)
        dist.all_gather_into_tensor(output, in_pool(blocks[rank], group), group=group)
        assert_same(output, torch.cat(blocks), (dtype, numel, "all_gather"))
        whole = in_pool(torch.empty(numel * size, dtype=dtype), group)
        mine = whole.narrow(0, rank * numel, numel).copy_(blocks[rank])
        dist.all_gather_into_tensor(whole, mine, group=group)
        assert_same(whole, torch.cat(blocks), (dtype, numel, "all_gather in place"))
        parts = [torch.empty(numel, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, in_pool(blocks[rank], group), group=group)
        for peer in range(size):
            assert_same(parts[peer], blocks[peer], (dtype, numel, "all_gather list"))

        root = case % size
        tensor = in_pool(blocks[rank], group) if case % 2 == 0 or rank == root else blocks[rank].clone()
        dist.broadcast(tensor, root, group=group)
        assert_same(tensor, blocks[root], (dtype, numel, "broadcast"))

        inputs = [values(peer, numel * size, dtype, case) for peer in range(size)]
        output = torch.empty(numel * size, dtype=dtype)
        dist.all_to_all_single(output, in_pool(inputs[rank], group), group=group)
        assert_same(output, torch.cat([each.view(size, numel)[rank] for each in inputs]), (dtype, numel, "all_to_all"))
    if size > 1:
        cases = len(MOVABLE) * len(MOVED)
        assert direct_calls(group, "all_gather_into_tensor") == 2 * cases
        assert direct_calls(group, "all_gather") == cases
        assert direct_calls(group, "broadcast") == cases
        assert direct_calls(group, "all_to_all_single") == cases
    dist.destroy_process_group(group)


def test_tensors_are_moved_whatever_their_dtype(run: Callable[..., Any]) -> None:
    run(check_movements)


def check_uneven_all_to_all() -> None:
    rank, size = world()
    group = new_group()
    splits = [[(3 * source + 5 * target + 1) % 7 * 100 for target in range(size)] for source in range(size)]
    inputs = [values(peer, sum(splits[peer]), torch.float32) for peer in range(size)]
    received = [splits[peer][rank] for peer in range(size)]
    expected = torch.cat([inputs[peer].split(splits[peer])[rank] for peer in range(size)])
    for make in (in_pool, lambda tensor, group: tensor):
        output = torch.empty(sum(received))
        dist.all_to_all_single(output, make(inputs[rank], group), received, splits[rank], group=group)
        assert_same(output, expected, "uneven")
    assert direct_calls(group, "all_to_all_single") == (1 if size > 1 else 0)
    dist.destroy_process_group(group)


def test_all_to_all_with_uneven_splits(run: Callable[..., Any]) -> None:
    run(check_uneven_all_to_all)


def check_unlike_plans() -> None:
    """Ranks with much and with little to send, with a list and with one tensor: alone, each would choose otherwise."""
    rank, size = world()
    group = dist.new_group(backend="zeropg")
    for turn in range(6):
        counts = [400_000 if (source + turn) % 2 == 0 else 250 for source in range(size)]
        inputs = [values(peer, counts[peer] * size, torch.float32, turn) for peer in range(size)]
        output = torch.empty(sum(counts))
        dist.all_to_all_single(output, in_pool(inputs[rank], group), counts, [counts[rank]] * size, group=group)
        assert_same(output, torch.cat([inputs[peer].view(size, -1)[rank] for peer in range(size)]), ("uneven", turn))

        whole = [values(peer, LARGE * size, torch.float32, turn) for peer in range(size)]
        mine, output = in_pool(whole[rank], group), torch.empty(LARGE)
        if rank == turn % size:
            dist.reduce_scatter(output, list(mine.chunk(size)), group=group)
        else:
            dist.reduce_scatter_tensor(output, mine, group=group)
        assert_same(output, reduced([each.view(size, LARGE)[rank] for each in whole], dist.ReduceOp.SUM), turn)
    dist.destroy_process_group(group)


def test_ranks_that_would_plan_differently(run: Callable[..., Any]) -> None:
    run(check_unlike_plans)


def check_mixed() -> None:
    """Some tensors are in the pool and some are not, differently on each rank."""
    rank, size = world()
    group = new_group(bank_bytes=64 << 10)
    for case in range(4 * 2**size):
        numel = (1, 1003, LARGE)[case % 3]
        is_in_pool = bool(case >> rank & 1)
        inputs = [values(peer, numel, torch.float32, case) for peer in range(size)]
        tensor = in_pool(inputs[rank], group) if is_in_pool else inputs[rank].clone()
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, reduced(inputs, dist.ReduceOp.SUM), case)

        output = torch.empty(numel * size)
        dist.all_gather_into_tensor(output, in_pool(inputs[rank], group) if is_in_pool else inputs[rank], group=group)
        assert_same(output, torch.cat(inputs), case)

        tensor = in_pool(inputs[rank], group) if is_in_pool else inputs[rank].clone()
        dist.broadcast(tensor, case % size, group=group)
        assert_same(tensor, inputs[case % size], case)

        whole = [values(peer, numel * size, torch.float32, case) for peer in range(size)]
        source = in_pool(whole[rank], group) if is_in_pool else whole[rank].clone()
        output = torch.empty(numel)
        dist.reduce_scatter_tensor(output, source, group=group)
        assert_same(output, reduced([each.view(size, numel)[rank] for each in whole], dist.ReduceOp.SUM), case)
        output = torch.empty(numel * size)
        dist.all_to_all_single(output, source, group=group)
        assert_same(output, torch.cat([each.view(size, numel)[rank] for each in whole]), case)
    if size > 1:
        assert 0 < direct_calls(group, "all_reduce") < 4 * 2**size
    dist.destroy_process_group(group)


def test_where_some_ranks_tensors_are_elsewhere(run: Callable[..., Any]) -> None:
    run(check_mixed)


def check_views() -> None:
    import zeropg

    rank, size = world()
    group = new_group()
    base = zeropg.empty(7, 101, 13, group=group)
    assert base.shape == (7, 101, 13) and base.dtype == torch.get_default_dtype() and base.is_contiguous()
    assert base.data_ptr() % 64 == 0
    base.fill_(rank + 1)
    total = size * (size + 1) / 2
    dist.all_reduce(base[2], group=group)  # a slice: its neighbours are left alone
    assert (base[2] == total).all() and (base[1] == rank + 1).all() and (base[3] == rank + 1).all()
    odd = base.view(-1)[5 + rank : 1005 + rank]  # at another place on each rank
    odd.fill_(1.0)
    dist.all_reduce(odd, group=group)
    assert (odd == size).all()
    assert direct_calls(group, "all_reduce") == (2 if size > 1 else 0)
    strided = base[:, 3, :].fill_(2.0)  # not contiguous: copied out and back
    dist.all_reduce(strided, group=group)
    assert (base[:, 3, :] == 2.0 * size).all()
    assert direct_calls(group, "all_reduce") == (2 if size > 1 else 0)
    works = []
    tensors = [zeropg.empty(5000, dtype=torch.int64, group=group).fill_(rank) for _ in range(8)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works:
        work.wait()
    assert all((tensor == size * (size - 1) // 2).all() for tensor in tensors)
    assert zeropg.empty(0, group=group).numel() == 0 and zeropg.empty((), group=group).shape == ()
    dist.destroy_process_group(group)


def test_views_slices_and_strided_tensors(run: Callable[..., Any]) -> None:
    run(check_views)


def check_lifetime() -> None:
    import zeropg

    rank, size = world()
    group = new_group()
    tensor = zeropg.empty(100_000, group=group).fill_(rank)
    dist.all_reduce(tensor, group=group)
    address = zeropg.empty(1000, group=group).data_ptr()
    assert zeropg.empty(1000, group=group).data_ptr() == address  # freed memory is used again
    dist.destroy_process_group(group)
    del group
    gc.collect()
    tensor += 1
    assert (tensor == size * (size - 1) / 2 + 1).all()
    dist.all_reduce(tensor)  # of another group: an ordinary tensor
    assert (tensor == size * (size * (size - 1) / 2 + 1)).all()


def test_a_tensor_outlives_its_group(run: Callable[..., Any]) -> None:
    run(check_lifetime)


def check_limits() -> None:
    import zeropg

    _rank, size = world()
    group = new_group(pool_bytes=1 << 20)
    kept = zeropg.empty(100_000, group=group)
    for numel in (200_000, 300_000):
        with pytest.raises(dist.DistBackendError, match=r"\[zeropg rank \d/\d\] allocate_tensor: .*pool_bytes"):
            zeropg.empty(numel, group=group)
    for shape in ((2**62,), (2**61, 1), (2**32, 2**32), (2**40, 2**40), (-1,)):
        with pytest.raises(ValueError, match=r"cannot allocate -?\d+ elements of 4 bytes|more than a tensor can have"):
            zeropg.empty(shape, dtype=torch.float32, group=group)
    dist.all_reduce(kept.fill_(1), group=group)
    assert (kept == size).all()
    dist.destroy_process_group(group)

    group = new_group(pool_bytes=0)
    assert not group._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu"))
    with pytest.raises(dist.DistBackendError, match="pool_bytes"):
        zeropg.empty(1, group=group)
    tensor = torch.ones(1003)
    dist.all_reduce(tensor, group=group)
    assert (tensor == size).all()
    dist.destroy_process_group(group)


def test_lack_of_room_is_an_error_that_says_what_to_do(run: Callable[..., Any]) -> None:
    run(check_limits)


def check_sizes_that_differ() -> None:
    import zeropg

    rank, _ = world()
    options = zeropg.BackendOptions(pool_bytes=(1 + rank) << 20)
    # The leader's size is that of the pool; the other one says what is wrong.
    with pytest.raises(dist.DistBackendError, match="rank 1" if rank == 0 else "give every rank the same pool_bytes"):
        dist.new_group(backend="zeropg", pg_options=options)


def test_ranks_must_give_the_same_pool_bytes() -> None:
    run_ranks(2, check_sizes_that_differ)


def check_fork() -> None:
    import zeropg

    _rank, size = world()
    tensor = zeropg.empty(5000).fill_(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        total = tensor.sum().item()
        del tensor
        gc.collect()
        try:
            zeropg.empty(10)
            answer = "it allocated"
        except Exception as error:
            answer = f"{total} {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 10_000).decode()
    os.waitpid(child, 0)
    assert answer.startswith("5000.0 ") and "forked process" in answer, answer
    assert zeropg.empty(5000).data_ptr() != tensor.data_ptr()  # still ours, whatever the child let go
    dist.all_reduce(tensor)
    assert (tensor == size).all()


def test_a_forked_child_reads_tensors_and_makes_none(run: Callable[..., Any]) -> None:
    run(check_fork)


def check_foreign_groups() -> None:
    import zeropg

    with pytest.raises(TypeError, match="gloo, expected zeropg"):
        zeropg.empty(3, group=dist.new_group(backend="gloo"))
    dist.all_reduce(torch.ones(3))


def test_other_backends_have_no_such_tensors() -> None:
    run_ranks(2, check_foreign_groups)


def check_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    import zeropg

    rank, size = world()
    losses: dict[bool, list[float]] = {}
    for is_in_pool in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        mesh = dist.init_device_mesh("cpu", (size,))
        fully_shard(model, mesh=mesh)
        if is_in_pool:
            model.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[is_in_pool] = []
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[is_in_pool].append(loss.item())
    assert losses[False] == losses[True]
    group = mesh.get_group()
    if size > 1:
        assert sum(each["direct_calls"] for each in zeropg.stats(group).values()) > 0


def test_fsdp2_takes_its_buffers_from_the_group(run: Callable[..., Any]) -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("this torch has no such hook")
    run(check_fsdp2)
