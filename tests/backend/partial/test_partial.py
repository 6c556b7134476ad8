"""Partial reductions: every gradient counts once, late ranks hold nobody up, and all ranks get the same bits."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeropg
from tests.spawn import RankPool, SeparateHosts, run_ranks

SIZES = ((300, 7), (1,), (20_001,))


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Whole numbers, so that sums do not depend on their order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-100, 100, size, generator=generator).to(dtype) for size in SIZES]


def random_delays(steps: int, tolerance: float, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Returns digests of all averages, whether they and what is owed add up, and what the state says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = zeropg.PartialReduction(slow_node_tolerance=tolerance, max_steps_behind=2)
    delays = random.Random(seed + rank)
    left = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    digests, fewest = [], ranks
    for step in range(steps):
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.02)
        found = gradients(rank, step, dtype)
        fewest = min(fewest, state.average_(found))
        digests.append([tensor.double().sum().item() for tensor in found])
        for parts in zip(left, found, *(gradients(each, step) for each in range(ranks)), strict=True):
            parts[0].add_(sum(parts[2:]) - parts[1].double() * ranks)
    dist.barrier()
    for rest, owed in zip(left, state.state_dict()["owed"], strict=True):
        rest -= owed.view(rest.shape)
    state.close()
    return digests, max(rest.abs().max().item() for rest in left) < 0.01, fewest, state.missed


@pytest.mark.parametrize("hosts", [(0,), (0, 0), (0, 0, 0, 1, 1)], ids=str)
def test_every_gradient_counts_once_and_ranks_agree(hosts: tuple[int, ...]) -> None:
    ranks = len(hosts)
    with RankPool(ranks, place=SeparateHosts(hosts=hosts)) as pool:
        for tolerance, dtype in ((0.0, torch.float32), (0.5, torch.float32), (0.4, torch.float64)):
            results = pool.run(random_delays, 30, tolerance, dtype, 5)
            assert all(result == results[0] for result in results), "all ranks get the same bits"
            _, adds_up, fewest, missed = results[0]
            assert adds_up
            assert ranks - int(tolerance * ranks) <= fewest <= ranks
            assert (fewest < ranks) == any(missed.values())


LATE = 4  # the step that one rank comes to late


def late_rank(late: int) -> tuple[list[float], list[int], list[int], int]:
    """Returns seconds of each step, contributors, sums of the first element, and what is owed of it."""
    rank = dist.get_rank()
    state = zeropg.PartialReduction(slow_node_tolerance=0.34)
    seconds, contributors, firsts = [], [], []
    for step in range(LATE + 3):
        if step <= LATE:
            dist.barrier()
        if step == LATE and rank == late:
            time.sleep(1)
        gradient = torch.full((10,), float(10**rank))
        start = time.monotonic()
        contributors.append(state.average_([gradient]))
        seconds.append(time.monotonic() - start)
        firsts.append(round(gradient[0].item() * dist.get_world_size()))
    dist.barrier()
    owed = round(state.state_dict()["owed"][0][0].item())
    state.close()
    return seconds, contributors, firsts, owed


def test_others_go_on_without_a_late_rank_and_wait_before_it_is_two_steps_behind() -> None:
    for late in (0, 2):
        results = run_ranks(3, late_rank, late)
        assert all(result[1:] == results[0][1:] for result in results)
        _, contributors, firsts, owed = results[0]
        assert contributors[0] == 3, "the first step waits for all"
        assert contributors[LATE] == 2
        assert sum(firsts) + owed == len(firsts) * 111
        on_time = results[2 - late][0]
        assert on_time[LATE] < 0.5
        assert on_time[LATE + 1] > 0.4, "the late rank has not come to the step before"
        assert results[late][0][LATE] < 0.5, "its average was there"


def train(partial: bool, static_graph: bool = False) -> tuple[list[float], int, int]:
    """Returns losses, contributors to the last step, and for how many buckets there are reductions that do not wait."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1, static_graph=static_graph)
    state = zeropg.PartialReduction(slow_node_tolerance=0.0)
    if partial:
        ddp.register_comm_hook(state, zeropg.partial_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        x = torch.randn(16, 20, generator=generator)
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    buckets = len(state.state_dict()["owed"])
    state.close()
    return losses, state.contributors, buckets


def test_ddp_trains_as_without_where_nobody_may_be_late() -> None:
    with RankPool(3) as pool:
        plain = pool.run(train, False)
        for static_graph in (False, True):
            partial = pool.run(train, True, static_graph)
            for (expected, *_), (found, contributors, buckets) in zip(plain, partial, strict=True):
                assert found == pytest.approx(expected, rel=1e-5)
                assert contributors == 3
                assert buckets > 1


def owe() -> tuple[list[float], dict[str, Any]]:
    """Rank 1 comes too late to the third step."""
    state = zeropg.PartialReduction(slow_node_tolerance=0.5)
    firsts = []
    for step in range(3):
        dist.barrier()
        if dist.get_rank() == 1 and step == 2:
            time.sleep(1)
        gradient = torch.full((4,), 1.0 if dist.get_rank() == 0 else 7.0)
        state.average_([gradient])
        firsts.append(gradient[0].item())
    dist.barrier()
    debt = state.state_dict()
    state.close()
    return firsts, debt


def load(debt: dict[str, Any]) -> list[float]:
    state = zeropg.PartialReduction(slow_node_tolerance=0.0)
    state.load_state_dict(debt)
    firsts = []
    for _ in range(2):
        gradient = torch.zeros(4)
        state.average_([gradient])
        firsts.append(gradient[0].item())
    state.close()
    return firsts


def test_what_is_owed_survives_a_checkpoint_and_another_number_of_ranks() -> None:
    (firsts, debt), (same_firsts, same_debt) = run_ranks(2, owe)
    assert firsts == same_firsts
    assert debt["ranks"] == 2
    owed = debt["owed"][0]
    assert owed[0] >= 7
    assert 2 * sum(firsts) + owed[0] == 3 * 8
    assert torch.equal(owed, same_debt["owed"][0])
    for ranks in (1, 2, 3):
        assert run_ranks(ranks, load, debt) == [[pytest.approx(owed[0].item() / 2), 0.0]] * ranks


def differ(**arguments: Any) -> None:
    """The first step of a PartialReduction whose arguments are given by rank, as are numels and dtypes of the step."""
    given = {name: by_rank[dist.get_rank()] for name, by_rank in arguments.items()}
    sizes, dtype = given.pop("sizes", [3]), given.pop("dtype", torch.float32)
    zeropg.PartialReduction(**given).average_([torch.ones(size, dtype=dtype) for size in sizes])


def take_turns() -> None:
    """Two DDPs of one PartialReduction."""
    state = zeropg.PartialReduction()
    models = [DistributedDataParallel(nn.Linear(size, 1)) for size in (3, 4)]
    for model in models:
        model.register_comm_hook(state, zeropg.partial_hook)
    for size, model in enumerate(models, start=3):
        model(torch.ones(1, size)).sum().backward()


def wrong_uses() -> list[str]:
    said = []

    def note(call: Any) -> None:
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            said.append(str(error))

    for arguments in (
        {"slow_node_tolerance": 1.0},
        {"slow_node_tolerance": -0.1},
        {"max_steps_behind": 0},
        {"patience": -1},
    ):
        note(lambda arguments=arguments: zeropg.PartialReduction(**arguments))
    note(lambda: zeropg.PartialReduction(dist.new_group(backend="gloo")))
    state = zeropg.PartialReduction()
    note(lambda: state.average_([torch.ones(3, dtype=torch.int32)]))
    note(lambda: state.average_([]))
    state.average_([torch.ones(3)])
    note(lambda: state.average_([torch.ones(4)]))
    note(lambda: state.average_([torch.ones(3, dtype=torch.float64)]))
    note(lambda: state.load_state_dict(state.state_dict()))
    state.average_([torch.ones(3)])
    state.close()
    state.close()
    note(lambda: state.average_([torch.ones(3)]))
    other = zeropg.PartialReduction()
    other.load_state_dict({"owed": [torch.ones(5)], "ranks": 2})
    note(lambda: other.average_([torch.ones(3)]))
    note(lambda: zeropg.partial_hook(None, None))  # type: ignore[arg-type]
    note(lambda: differ(slow_node_tolerance=(0.0, 0.5)))
    note(lambda: differ(max_steps_behind=(1, 2)))
    note(lambda: differ(patience=(0.1, 0.2)))
    note(lambda: differ(sizes=([3, 3], [3])))
    note(lambda: differ(sizes=([3, 4], [3, 5])))
    note(lambda: differ(dtype=(torch.float32, torch.float64)))
    note(lambda: differ(dtype=(torch.float32, torch.int64)))
    note(take_turns)
    return said


def test_wrong_uses_are_a_sentence_each() -> None:
    said = run_ranks(2, wrong_uses)
    assert said[0] == [text.replace("rank 1/2", "rank 0/2") for text in said[1]]
    expected = [
        "is 1.0",
        "is -0.1",
        "max_steps_behind is 0",
        "patience is -1",
        "not zeropg",
        "int32",
        "expected gradients",
        "[(4, torch.float32)]",
        "torch.float64",
        "load into a new one",
        "it is closed",
        "of [5] elements",
        "the state is None",
        "slow_node_tolerance is '0.0' on rank 0, but '0.5' on rank 1",
        "max_steps_behind is '1' on rank 0, but '2' on rank 1",
        "patience is '0.1' on rank 0, but '0.2' on rank 1",
        "the number of a step's tensors is '2' on rank 0, but '1' on rank 1",
        "tensor 1 of a step is '4 elements, torch.float32' on rank 0, but '5 elements, torch.float32' on rank 1",
        "tensor 0 of a step is '3 elements, torch.float32' on rank 0, but '3 elements, torch.float64' on rank 1",
        "rank 1: expected gradients of floats, got ['torch.int64']",
        "make a PartialReduction for each DDP",
    ]
    assert len(said[0]) == len(expected)
    for text, part in zip(said[0], expected, strict=True):
        assert part in text


def lose_a_rank() -> str:
    state = zeropg.PartialReduction(slow_node_tolerance=0.34)
    state.average_([torch.ones(3)])
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    said = "went on"
    try:
        for _ in range(4):
            state.average_([torch.ones(3)])
    except RuntimeError as error:
        said = str(error)
    with pytest.raises(RuntimeError):
        state.close()
    del state  # its threads are joined: the other ranks never close it
    gc.collect()
    return said


def test_a_rank_that_dies_is_an_error_on_the_others_which_can_let_go() -> None:
    said = run_ranks(3, lose_a_rank, expect_death=(2,))
    assert all("rank 2" in text for text in said[:2]), said


def never_comes() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    state = zeropg.PartialReduction(group, slow_node_tolerance=0.0)
    state.average_([torch.ones(3)])
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    try:
        state.average_([torch.ones(3)])
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_rank_that_never_comes_is_named() -> None:
    said = run_ranks(2, never_comes)
    assert "round 1 has not come within 1500 ms; these ranks have not come to it: 1" in said[0]
