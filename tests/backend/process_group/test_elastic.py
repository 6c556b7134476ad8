"""Other ranks in a group: smaller groups of those that are left, and groups that get new members."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.backend.deadlines import give_seconds, new_group_with
from tests.spawn import SeparateHosts, run_ranks

CPU = torch.device("cpu")
CAN_RECONFIGURE = hasattr(dist, "_reconfigure")


def total(group: Any = None) -> float:
    tensor = torch.tensor([float(dist.get_rank(group) + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shrink_after_a_death(dead: int) -> tuple[int, list[float]]:
    from torch.nn.parallel import DistributedDataParallel as DDP

    import zeropg

    backend: Any = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    assert total() == 6
    if dist.get_rank() == dead:
        die()
    with pytest.raises(dist.DistBackendError, match=f"rank {dead}"):
        total()
    start = time.monotonic()
    new = zeropg.shrink_group([dead])
    assert time.monotonic() - start < 20
    assert new is dist.group.WORLD and dist.get_world_size() == 2 and total() == 3
    assert zeropg.topology().nodes == [[0, 1]]
    with pytest.raises(RuntimeError, match=rf"rank {dead} died|was shrunk by|shut down"):
        backend.allreduce([torch.ones(1)]).wait()
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 2))  # its logger takes a group that is registered as gloo's for a ProcessGroupGloo
    loss = model(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean()
    loss.backward()
    return dist.get_rank(), model.module.weight.grad.flatten().tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_the_living_make_a_smaller_world(dead: int) -> None:
    results = run_ranks(3, shrink_after_a_death, dead, expect_death={dead})
    living = [result for result in results if result is not None]
    assert [rank for rank, _ in living] == [0, 1]
    assert living[0][1] == living[1][1] != [0.0] * 6


def shrink_twice() -> list[int]:
    import zeropg

    me, sizes = dist.get_rank(), []
    for dead in (3, 1):
        if me == dead:
            die()
        with pytest.raises(dist.DistBackendError):
            total()
        group = zeropg.shrink_group([dead])
        sizes.append(group.size())
        assert total() == sum(range(1, group.size() + 1))
    return sizes


def test_a_group_is_shrunk_again() -> None:
    assert run_ranks(4, shrink_twice, expect_death={1, 3}) == [[3, 2], None, [3, 2], None]


def shrink_a_child() -> float:
    import zeropg

    me = dist.get_rank()
    child = dist.split_group(split_ranks=[[3, 0, 2], [1]])  # type: ignore[attr-defined]
    assert total(child) == (1 if me == 1 else 6)
    if me == 3:
        die()
    if me == 1:
        return total(child)
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        total(child)
    small = zeropg.shrink_group([0], child)
    assert dist.get_process_group_ranks(small) == [0, 2] and dist.get_world_size() == 4
    return total(small)


@pytest.mark.skipif(not CAN_RECONFIGURE, reason="torch 2.11 splits groups on CUDA alone")
def test_a_group_made_by_split_is_shrunk() -> None:
    assert run_ranks(4, shrink_a_child, expect_death={3}, timeout=120) == [3, 1, 3, None]


def shrink_with_all_alive(abort: bool) -> float:
    import zeropg

    group = dist.new_group()
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(1.0)  # it lives, and takes no part
        return 0
    open_receive = dist.irecv(torch.empty(1), 2, group=group) if abort else None
    small = zeropg.shrink_group([2], group, abort=abort)
    if open_receive is not None:
        with pytest.raises(dist.DistBackendError, match=r"was shrunk by 2|failed"):
            open_receive.wait()
    return total(small)


@pytest.mark.parametrize("abort", [False, True])
def test_a_group_is_shrunk_while_all_live(abort: bool) -> None:
    assert run_ranks(3, shrink_with_all_alive, abort) == [3, 3, 0]


def shrink_wrongly() -> None:
    import zeropg

    rank = dist.get_rank()
    backend: Any = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    for ranks, match in (
        ([], "no rank is excluded"),
        ([9], "is rank 9, expected 0 to 1"),
        ([rank], "this rank is one"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            backend.shrink(ranks)
        assert str(caught.value).startswith(f"[zeropg rank {rank}/2] shrink"), caught.value
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(TypeError, match="expected zeropg"):
        zeropg.shrink_group([1 - rank], gloo)
    assert total() == 3


def test_wrong_ranks_leave_the_group_as_it_is() -> None:
    run_ranks(2, shrink_wrongly)


def shrink_alone(rank_that_stays_away: int) -> None:
    import zeropg

    group = new_group_with(2)
    if dist.get_rank() == rank_that_stays_away:
        time.sleep(3)
    elif dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match=r"rank 1"):
            zeropg.shrink_group([2], group)


def test_who_does_not_come_to_the_smaller_group_is_named() -> None:
    run_ranks(3, shrink_alone, 1)


# The rest is torch 2.15's.
reconfigures = pytest.mark.skipif(not CAN_RECONFIGURE, reason="torch 2.11 cannot reconfigure groups")


def make_open_group() -> tuple[Any, dist.Store]:
    import zeropg  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group(
        "zeropg",
        store=store,
        rank=rank,
        world_size=size,
        enable_reconfigure=True,
        timeout=timedelta(seconds=60),
    )
    store.set(f"handle{rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
    return dist.group.WORLD, store


def handles(store: dist.Store, ranks: list[int]) -> list[str]:
    return [store.get(f"handle{rank}").decode() for rank in ranks]


def change_members() -> list[float]:
    group, store = make_open_group()
    me = int(os.environ["RANK"])
    assert dist._supports_reconfigure()  # type: ignore[attr-defined]
    with pytest.raises(dist.DistBackendError, match="call reconfigure first"):
        group._get_backend(CPU).allreduce([torch.ones(1)])
    sums = []
    for uuid, members in enumerate(([2, 0, 1], [1, 2], [0, 1, 2])):
        if me in members:
            dist._reconfigure(uuid=uuid, handles=handles(store, members)).wait()  # type: ignore[attr-defined]
            assert (dist.get_rank(), dist.get_world_size()) == (members.index(me), len(members))
            sums.append(total())
            backend = group._get_backend(CPU)
            assert backend.topology().world_size == len(members) and "all_reduce" in backend.stats()
    dist._reconfigure(uuid=10, handles=set(handles(store, [0, 1, 2]))).wait()  # type: ignore[attr-defined]
    assert dist.get_rank() == me
    return [*sums, total()]


@reconfigures
def test_a_group_gets_other_members() -> None:
    assert run_ranks(3, change_members, backend=None, timeout=120) == [[6, 6, 6], [6, 3, 6, 6], [6, 3, 6, 6]]


def go_on_after_a_death() -> float:
    group, store = make_open_group()
    me = int(os.environ["RANK"])
    everybody = handles(store, [0, 1, 2])
    dist._reconfigure(uuid=1, handles=everybody).wait()  # type: ignore[attr-defined]
    if me == 1:
        die()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        total()
    dist._reconfigure(uuid=2, handles=[everybody[0], everybody[2]]).wait()  # type: ignore[attr-defined]
    assert group.size() == 2
    return total()


@reconfigures
def test_the_living_go_on_in_the_same_group() -> None:
    assert run_ranks(3, go_on_after_a_death, backend=None, expect_death={1}) == [3, None, 3]


def reconfigure_wrongly() -> None:
    group, store = make_open_group()
    me = int(os.environ["RANK"])
    both = handles(store, [0, 1])

    def reconfigure(uuid: int, members: list[str]) -> None:
        dist._reconfigure(uuid=uuid, handles=members).wait()  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match="this rank's handle is not among the 1 given"):
        reconfigure(1, [both[1 - me]])
    with pytest.raises(ValueError, match="a handle is given twice"):
        reconfigure(2, [both[me], both[me]])
    reconfigure(3, both)
    with pytest.raises(ValueError, match="the uuid 3 was used before"):
        reconfigure(3, both)
    assert total() == 3
    if me == 0:
        give_seconds(group, 4)
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            reconfigure(4, both)
        give_seconds(group, 60)
    else:
        time.sleep(5)
    reconfigure(5, both)
    assert total() == 3


@reconfigures
def test_wrong_handles_and_missing_members_are_errors_and_it_can_be_tried_again() -> None:
    run_ranks(2, reconfigure_wrongly, backend=None)


def split_nodes() -> float:
    import zeropg

    group = dist.new_group()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        return 0
    return total(zeropg.shrink_group([1], group))


def test_a_group_over_two_hosts_is_shrunk() -> None:
    assert run_ranks(3, split_nodes, place=SeparateHosts(hosts=(0, 0, 1))) == [3, 0, 3]
