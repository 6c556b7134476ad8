"""More than 16 ranks of one node in several domains, which they are told: what is reduced over domains, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg.backend
from tests.backend.reference import assert_same, reduced, values
from tests.spawn import RankPool, SeparateDomains

Op = dist.ReduceOp
UNEVEN_AND_IN_TURN = (*(0, 1, 2) * 5, 1, 2, 2)  # 5, 6 and 7 ranks
DOMAINS = [[rank for rank, domain in enumerate(UNEVEN_AND_IN_TURN) if domain == number] for number in range(3)]
SMALL = (0, 1, 17, 1003)
LARGE = 100_003  # more chunks and banks than one, and odd


@pytest.fixture(scope="module")
def run(rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(len(UNEVEN_AND_IN_TURN), place=SeparateDomains(domains=UNEVEN_AND_IN_TURN)).run


def inputs_of_all(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(peer, numel, dtype, numel) for peer in range(dist.get_world_size())]


def check_forced_algorithm() -> None:
    options = zeropg.backend.BackendOptions(algorithms={"all_reduce": "all_reduce_domains"}, bank_bytes=16 << 10)
    group = dist.new_group(backend="zeropg", pg_options=options)
    halves = dist._make_nccl_premul_sum(0.5)
    cases: list[tuple[torch.dtype, Any, Any, int]] = []
    for numel in SMALL:
        cases += [(dtype, Op.SUM, Op.SUM, numel) for dtype in (torch.int64, torch.int16, torch.bool, torch.complex64)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            cases += [(dtype, op, op, numel) for op in (Op.SUM, Op.AVG, Op.MAX, Op.PRODUCT)]
            cases.append((dtype, halves, Op.PREMUL_SUM, numel))
    cases += [(dtype, Op.SUM, Op.SUM, LARGE) for dtype in (torch.float32, torch.bfloat16)]
    for dtype, op, kind, numel in cases:
        inputs = inputs_of_all(numel, dtype)
        tensor = inputs[dist.get_rank()].clone()
        dist.all_reduce(tensor, op=op, group=group)
        # The same on all ranks: the bits of one truth.
        assert_same(tensor, reduced(inputs, kind, 0.5, domains=DOMAINS), (dtype, kind, numel))
    dist.destroy_process_group(group)


def test_all_reduce_over_domains_gives_the_bits_of_a_sum_domain_by_domain_rounded_once(
    run: Callable[..., Any],
) -> None:
    run(check_forced_algorithm)


def check_forced_neighbours() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {op: f"{op}_domains" for op in ("reduce_scatter", "all_gather", "broadcast")}
    options = zeropg.backend.BackendOptions(algorithms=names, bank_bytes=16 << 10)
    group = dist.new_group(backend="zeropg", pg_options=options)
    for numel in (*SMALL, 5003):
        for dtype, op in ((torch.bfloat16, Op.SUM), (torch.bfloat16, Op.AVG), (torch.float32, Op.AVG)):
            inputs = inputs_of_all(numel * size, dtype)
            block = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_tensor(block, inputs[rank], op=op, group=group)
            blocks = [tensor.view(size, numel)[rank] for tensor in inputs]
            assert_same(block, reduced(blocks, op, domains=DOMAINS), (dtype, op, numel))
        inputs = inputs_of_all(numel, torch.int16)
        gathered = torch.empty(size * numel, dtype=torch.int16)
        dist.all_gather_into_tensor(gathered, inputs[rank], group=group)
        assert_same(gathered, torch.cat(inputs), numel)
        for root in (0, 4, size - 1):
            tensor = inputs[rank].clone()
            dist.broadcast(tensor, root, group=group)
            assert_same(tensor, inputs[root], (numel, root))
    dist.destroy_process_group(group)


def test_reduce_scatter_all_gather_and_broadcast_over_domains(run: Callable[..., Any]) -> None:
    run(check_forced_neighbours)


def check_choice() -> None:
    topology = zeropg.backend.topology()
    assert topology.domains == [DOMAINS]
    assert "0 3 6 9 12 | 1 4 7 10 13 15 | 2 5 8 11 14 16 17" in str(topology).replace("*", "")
    for numel, domains in ((10, None), (LARGE, DOMAINS)):
        inputs = inputs_of_all(numel, torch.float32)
        tensor = inputs[dist.get_rank()].clone()
        dist.all_reduce(tensor)
        assert_same(tensor, reduced(inputs, Op.SUM, domains=domains), numel)
    flat, by_domains = (reduced(inputs, Op.SUM, domains=domains) for domains in (None, DOMAINS))
    assert not torch.equal(flat, by_domains)  # or the above says nothing


def test_large_tensors_go_over_domains_and_small_ones_in_one_step(run: Callable[..., Any]) -> None:
    run(check_choice)


def check_smaller_group() -> None:
    group = dist.new_group(list(range(16)), backend="zeropg")
    if dist.get_rank() < 16:
        inputs = inputs_of_all(LARGE, torch.float32)[:16]
        tensor = inputs[dist.get_rank()].clone()
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, reduced(inputs, Op.SUM), "flat")
        dist.destroy_process_group(group)


def test_a_group_of_sixteen_takes_no_notice_of_domains(run: Callable[..., Any]) -> None:
    run(check_smaller_group)
