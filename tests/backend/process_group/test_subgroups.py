"""Groups made from groups: split_group, new_group with a bound device, device meshes, merge; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.spawn import RankPool, run_ranks

CPU = torch.device("cpu")
IS_OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)


@pytest.fixture(scope="module")
def run(rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(4).run


def split(ranks: list[int], name: str, **arguments: Any) -> Any:
    """ProcessGroup.split_group, which torch 2.11 has for the CPU too (its dist.split_group asks for a GPU)."""
    return dist.group.WORLD.split_group(ranks, group_name=name, **arguments)  # type: ignore[union-attr]


def total(group: Any) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    group.allreduce([tensor]).wait()
    return tensor.item()


def check_split() -> None:
    rank = dist.get_rank()
    world = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    before = world.comm_split_count(), world.options._timeout, world.options.group_name
    mine = [0, 1] if rank < 2 else [2, 3]
    child = split(mine, f"half{mine[0]}", timeout=timedelta(seconds=17), group_desc="half")
    assert (child.rank(), child.size(), total(child)) == (mine.index(rank), 2, sum(mine))
    backend = child._get_backend(CPU)
    assert type(backend) is type(world)
    assert backend.options._timeout == timedelta(seconds=17)
    assert backend.options.global_ranks_in_group == mine
    assert (child.group_name, child.group_desc) == (f"half{mine[0]}", "half")
    grandchild = child.split_group([child.rank()], group_name=f"alone{rank}")
    assert total(grandchild) == rank and grandchild.size() == 1
    assert grandchild._get_backend(CPU).options.global_ranks_in_group == [rank]

    after = world.comm_split_count(), world.options._timeout, world.options.group_name
    assert after == (before[0] + 1, *before[1:]), "the parent keeps its options"
    assert backend._get_sequence_number_for_group() == 1, "a child counts its own operations"
    outside = split([0, 1, 2], "three")
    assert (outside is None) == (rank == 3)
    if outside is not None:
        assert total(outside) == 3
    child.shutdown()
    assert total(grandchild) == rank, "a child outlives its parent"
    dist.barrier()


def test_split(run: Callable[..., Any]) -> None:
    run(check_split)


def check_split_group() -> None:
    rank = dist.get_rank()
    group = dist.split_group(split_ranks=[[1, 0], [3, 2]], timeout=timedelta(seconds=33))
    assert group.rank() == 1 - rank % 2, "the order of the list counts"
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == (1 if rank < 2 else 5)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rank, group=group)
    assert gathered == ([1, 0] if rank < 2 else [3, 2])
    outside = dist.split_group(split_ranks=[[0, 2]])
    assert (outside == dist.GroupMember.NON_GROUP_MEMBER) == (rank % 2 == 1)
    again = dist.split_group(split_ranks=[[0, 1, 2, 3]])
    assert dist.group.WORLD is not None and again.group_desc == f"{dist.group.WORLD.group_desc}:split:2"
    with pytest.raises(TypeError, match=r"split: the options are those of the backend gloo, expected a zeropg"):
        dist.split_group(split_ranks=[[0, 1, 2, 3]], pg_options=dist.ProcessGroupGloo._Options())
    dist.barrier()


@pytest.mark.skipif(IS_OLD, reason="torch 2.11 splits groups with a GPU only")
def test_split_group() -> None:
    run_ranks(4, check_split_group)


def check_merge() -> None:
    """Two groups that know of each other by a store become one."""
    rank = dist.get_rank()
    mine = [0, 1] if rank < 2 else [2, 3]
    half = split(mine, f"merged half {mine[0]}")
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    merged = half.merge_remote_group(store, 4, timedelta(seconds=21), "merged", "both halves")
    assert (merged.size(), merged.group_name, merged.group_desc) == (4, "merged", "both halves")
    backend = merged._get_backend(CPU)
    assert type(backend) is type(half._get_backend(CPU)) and backend.options._timeout == timedelta(seconds=21)
    places = [torch.empty(1) for _ in range(4)]
    merged.allgather([places], [torch.tensor([float(rank)])]).wait()
    assert sorted(place.item() for place in places) == [0, 1, 2, 3] and places[merged.rank()].item() == rank
    half.shutdown()
    assert total(merged) == 6, "the merged group outlives those that it was made of"
    dist.barrier()


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="torch 2.11 merges no groups")
def test_merge(run: Callable[..., Any]) -> None:
    run(check_merge)


def check_options_are_inherited() -> None:
    from zeropg.backend import BackendOptions

    options = BackendOptions(bank_bytes=8192, algorithms={"all_reduce": "all_reduce_staged"})
    parent = dist.new_group(backend="zeropg", pg_options=options)
    child = parent.split_group([0, 1, 2, 3], group_name="inherits")
    given = child._get_backend(CPU).options
    assert (given.bank_bytes, given.algorithms) == (8192, {"all_reduce": "all_reduce_staged"})
    other = parent.split_group([0, 1, 2, 3], group_name="own", opts=BackendOptions(bank_bytes=16384))
    assert other._get_backend(CPU).options.bank_bytes == 16384
    assert total(child) == total(other) == 6


def test_a_child_has_its_parents_options_unless_given_others(run: Callable[..., Any]) -> None:
    run(check_options_are_inherited)


# What c10d offers and this backend does not, by the method of torch's Backend; torch 2.11 has fewer.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "_start_time_estimate": (lambda backend: backend._start_time_estimate(), "read zeropg.stats"),
    "_register_on_completion_hook": (
        lambda backend: backend._register_on_completion_hook(print),
        r"work.get_future\(\).then",
    ),
    "mem_allocator": (lambda backend: backend.mem_allocator, "use ordinary tensors"),
    "suspend": (lambda backend: backend.suspend(), "only NCCL has this"),
    "split_group": (lambda backend: split([0, 9], "beyond"), "is rank 9, expected 0 to 3"),
}


def check_refused(name: str) -> None:
    backend = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    call, match = REFUSED[name]
    with pytest.raises((NotImplementedError, ValueError), match=match) as caught:
        call(backend)
    assert str(caught.value).startswith(f"[zeropg rank {dist.get_rank()}/4] "), caught.value
    assert total(dist.group.WORLD) == 6


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_do_instead(run: Callable[..., Any], name: str) -> None:
    from torch._C._distributed_c10d import Backend

    if name != "split_group" and not hasattr(Backend, name):
        pytest.skip("this version of torch has no such call")
    if torch.cuda.is_available() and name in ("mem_allocator", "suspend"):
        pytest.skip("NCCL has it")
    run(check_refused, name)


def check_mesh() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, members in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == sum(members)
    flat = init_device_mesh("cpu", (4,))
    assert flat.get_group() is not None and flat.get_local_rank() == rank


def check_bound_device() -> None:
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import zeropg  # noqa: F401

    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group("zeropg", store=store, rank=rank, world_size=size, device_id=torch.device("cpu:0"))
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
    check_mesh()
    dist.barrier()
    dist.destroy_process_group()


def test_device_mesh(run: Callable[..., Any]) -> None:
    run(check_mesh)


@pytest.mark.skipif(IS_OLD, reason="torch 2.11 binds worlds to accelerators only")
def test_groups_of_a_world_with_a_bound_device() -> None:
    run_ranks(4, check_bound_device, backend=None, timeout=120)


def check_mesh_beside_gloo() -> None:
    import zeropg

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "zeropg"})
    assert zeropg.topology(mesh.get_group("dp")).world_size == 2
    with pytest.raises(TypeError, match="the group's CPU backend is gloo"):
        zeropg.topology(mesh.get_group("tp"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group("dp"))
    assert tensor.item() == 2


def test_one_mesh_dimension_beside_gloo() -> None:
    run_ranks(4, check_mesh_beside_gloo, backend="gloo", timeout=120)


def check_sequence_numbers() -> None:
    backend = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    start = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="expected"):
        dist.all_gather_into_tensor(torch.ones(5), torch.ones(2))
    assert backend._get_sequence_number_for_group() == start + 3, "a refused call does not count"


def test_sequence_numbers(run: Callable[..., Any]) -> None:
    run(check_sequence_numbers)


def check_detail() -> None:
    import zeropg

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2]
    assert zeropg.topology().world_size == 2 and zeropg.stats()["all_reduce"]["calls"] == 1
    with pytest.raises(RuntimeError, match="mismatch"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))


def test_the_wrapper_of_debug_level_detail() -> None:
    run_ranks(2, check_detail, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, fresh=True, timeout=180)
