"""The collectives of test_collectives.py on ranks of several hosts, and what is particular to those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg.backend
from tests.backend.process_group import test_collectives as on_one_node
from tests.backend.reference import assert_same, reduced, values
from tests.spawn import RankPool, SeparateHosts

EVEN = (0, 0, 1, 1)
UNEVEN_AND_IN_TURN = (0, 1, 0)
ONE_RANK_EACH = (0, 1, 2)


@pytest.fixture(scope="module", params=[EVEN, UNEVEN_AND_IN_TURN, ONE_RANK_EACH], ids=str)
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(len(request.param), place=SeparateHosts(hosts=request.param)).run


@pytest.mark.parametrize(
    "check",
    [
        on_one_node.check_all_reduce,
        on_one_node.check_premul_sum,
        on_one_node.check_reduce,
        on_one_node.check_reduce_scatter,
        on_one_node.check_broadcast,
        on_one_node.check_all_gather,
        on_one_node.check_gather_and_scatter,
        on_one_node.check_all_to_all,
        on_one_node.check_coalesced,
        on_one_node.check_many_in_flight,
    ],
)
def test_over_hosts(run: Callable[..., Any], check: Callable[[], None]) -> None:
    run(check)


def check_forced_algorithms() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    nodes = zeropg.backend.topology().nodes
    exact = torch.int32  # sums of pairs of nodes come in another order
    for name, dtype in (
        ("all_reduce_hierarchical", torch.bfloat16),
        ("all_reduce_hierarchical_one_shot", torch.bfloat16),
        ("all_reduce_doubling", exact),
        ("all_reduce_halving", exact),
    ):
        options = zeropg.backend.BackendOptions(
            algorithms={"all_reduce": name}, bank_bytes=64 << 10, window_bytes=4 << 10
        )
        group = dist.new_group(backend="zeropg", pg_options=options)
        for numel in (0, 1, 1003, 40_001):
            tensor = values(rank, numel, dtype)
            dist.all_reduce(tensor, group=group)
            inputs = [values(peer, numel, dtype) for peer in range(size)]
            assert_same(tensor, reduced(inputs, dist.ReduceOp.SUM, nodes=nodes), name)
        dist.destroy_process_group(group)
    options = zeropg.backend.BackendOptions(algorithms={"all_reduce": "all_reduce_staged"})
    group = dist.new_group(backend="zeropg", pg_options=options)
    with pytest.raises(ValueError, match=r"all_reduce_staged does not support .* nodes"):
        dist.all_reduce(torch.ones(3), group=group)


def test_forced_algorithms_agree_and_one_of_a_single_node_is_refused(run: Callable[..., Any]) -> None:
    run(check_forced_algorithms)
