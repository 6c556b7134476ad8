"""zeropg.compression.all_reduce with every codec: what must hold of each, between real processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compression.test_compressed_collectives import inputs_of_all
from tests.sharding.ranks import on_ranks, raises
from zeropg import compression
from zeropg.compression import BlockQuant, Codec, State, all_reduce
from zeropg.compression.codec import named_codecs

CODECS = {
    **named_codecs(),
    "one_bit_rotated": compression.OneBit(rotate=True),
    "two_bit_rotated": compression.TwoBit(rotate=True),
    "two_bit_entropy": compression.TwoBit(entropy=True),
    "int4_entropy": BlockQuant(4, entropy=True),
    "bf16_entropy": compression.Bf16(entropy=True),
    "top_10_percent_as_bytes": compression.TopK(0.1, value_bits=8),
    "top_half_by_sample": compression.TopK(0.5, exact=False),
}


def owed(state: State, numel: int, world_size: int) -> torch.Tensor:
    """What this rank still owes to sums."""
    total = torch.zeros(numel, dtype=torch.float64)
    for _, hop, start, values in state.residuals.segments():
        total[start : start + len(values)] += values.double() * (world_size if hop == 1 else 1)
    return total


def check_conservation(codec: Codec, numel: int, steps: int = 4) -> None:
    """Results and what all ranks still owe are what all ranks gave, and everybody has the same bits."""
    state = State(codec)
    given = torch.zeros(numel, dtype=torch.float64)
    got = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        inputs = inputs_of_all(numel, step)
        mine = inputs[dist.get_rank()].clone()
        assert all_reduce(mine, codec, state=state) is mine
        given += sum(each.double() for each in inputs)
        got += mine.double()
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        assert all(torch.equal(each, mine) for each in everybody), step
    debt = owed(state, numel, 1)
    dist.all_reduce(debt)
    torch.testing.assert_close(got + debt, given, atol=2e-5 * max(1.0, given.abs().max().item()), rtol=0)


@on_ranks(3)
def test_nothing_is_lost_and_all_ranks_get_the_same_bits() -> None:
    for codec in CODECS.values():
        for numel in (1, 77, 5000, 300_001):
            check_conservation(codec, numel)


def group_on_hosts(hosts: str) -> Any:
    """A group whose ranks count as being on the hosts that `hosts` names, e.g. "a,b,a"."""
    before = os.environ.get("ZEROPG_HOST_ID")
    os.environ["ZEROPG_HOST_ID"] = hosts.split(",")[dist.get_rank()]
    try:
        group = dist.new_group(backend="zeropg")
        dist.barrier(group)
        return group
    finally:
        if before is None:
            del os.environ["ZEROPG_HOST_ID"]
        else:
            os.environ["ZEROPG_HOST_ID"] = before


@pytest.mark.parametrize("hosts", ["0,1,0,1", "0,0,0,1", "0,1,2,3"])
@on_ranks(4)
def test_nothing_is_lost_between_hosts(hosts: str) -> None:
    group = group_on_hosts(hosts)
    for codec in CODECS.values():
        for numel in (3, 70_001):
            state = State(codec, process_group=group)
            given = torch.zeros(numel, dtype=torch.float64)
            got = torch.zeros(numel, dtype=torch.float64)
            for step in range(3):
                inputs = inputs_of_all(numel, step)
                mine = inputs[dist.get_rank()].clone()
                all_reduce(mine, codec, state=state)
                given += sum(each.double() for each in inputs)
                got += mine.double()
                first = mine.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, mine), codec
            debt = owed(state, numel, 1)
            # What a node owes of its sum is kept by the rank that sends it.
            dist.all_reduce(debt)
            bound = 2e-5 * max(1.0, given.abs().max().item())
            torch.testing.assert_close(got + debt, given, atol=bound, rtol=0, msg=lambda text: f"{codec}: {text}")  # noqa: B023


@on_ranks(2)
def test_top_k_sends_the_largest_of_the_whole_tensor() -> None:
    """Also where all of them lie in the part that one rank owns."""
    rank = dist.get_rank()
    tensor = torch.full((1000,), 0.01)
    places = torch.arange(10) * 7 + (0 if rank == 0 else 3)
    tensor[places] = torch.arange(10) + 1.0
    expected = torch.zeros(1000)
    for other in range(2):
        expected[torch.arange(10) * 7 + (0 if other == 0 else 3)] += torch.arange(10) + 1.0
    assert torch.equal(all_reduce(tensor, compression.TopK(0.01)), expected)
    # Of equal values the first ones.
    tensor = torch.ones(1000)
    assert torch.equal(all_reduce(tensor, compression.TopK(0.01)).nonzero().flatten(), torch.arange(10))
    everything = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    exact = everything.clone()
    dist.all_reduce(exact)
    torch.testing.assert_close(all_reduce(everything, compression.TopK(1.0)), exact)


@on_ranks(2)
def test_16_bit_tensors_are_summed_in_fp32_and_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for shape in ((1000,), (10, 30), ()):
            inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
            mine = inputs[dist.get_rank()].clone()
            wide = inputs[dist.get_rank()].float()
            codec = BlockQuant(8)
            all_reduce(mine, codec, state=State(codec))
            all_reduce(wide, codec, state=State(codec))
            assert mine.dtype == dtype
            assert torch.equal(mine, wide.to(dtype))


@on_ranks(2)
def test_any_strides_averages_and_asynchronous_calls() -> None:
    codec = compression.TopK(1.0)
    base = torch.arange(24.0).reshape(4, 6) * (dist.get_rank() + 1)
    exact = torch.arange(24.0).reshape(4, 6) * 3
    torch.testing.assert_close(all_reduce(base.clone().t(), codec), exact.t())
    work = all_reduce(averaged := base.clone(), codec, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    torch.testing.assert_close(averaged, exact / 2)
    empty = torch.empty(0)
    assert all_reduce(empty, codec) is empty


@on_ranks(2)
def test_a_value_that_is_not_finite_is_seen_by_all_and_spoils_no_later_step() -> None:
    for codec in CODECS.values():
        state = State(codec)
        for step, bad in enumerate([0.0, float("nan"), float("inf"), 0.0]):
            mine = inputs_of_all(5000, step)[dist.get_rank()]
            if dist.get_rank() == 1:
                mine[1000] += bad
            all_reduce(mine, codec, state=state)
            assert bool(mine[1000].isfinite()) == (bad == 0.0), codec
            assert bad != 0.0 or mine.isfinite().all(), codec
            assert all(values.isfinite().all() for *_, values in state.residuals.segments()), codec


@on_ranks(2)
def test_states_tell_tensors_apart_or_ask_for_names() -> None:
    codec = compression.TopK(0.5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    state = State(codec, model=model)
    model(torch.randn(2, 8)).sum().backward()
    for parameter in model.parameters():
        all_reduce(parameter.grad, codec, state=state)
    assert {name for name, *_ in state.residuals.segments()} == {name for name, _ in model.named_parameters()}
    state = State(codec)
    for _ in range(3):  # one tensor of a shape: a new object in each step is fine
        all_reduce(torch.randn(64), codec, state=state)
    one, other = torch.randn(32), torch.randn(32)
    all_reduce(one, codec, state=state)
    with raises(ValueError, "two tensors of shape (32,)", "name="):
        all_reduce(other, codec, state=state)
    all_reduce(one, codec, state=state)
    all_reduce(other, codec, state=state, name="other")
    with raises(ValueError, "'other' has 48 elements", "had 32"):
        all_reduce(torch.randn(48), codec, state=state, name="other")
    all_reduce(torch.randn(4, 8), codec, state=state, name="other")


@on_ranks(2)
def test_what_cannot_be_compressed_is_refused_on_every_rank() -> None:
    codec = compression.TopK(0.5)
    with raises(TypeError, "Int", "float32"):
        all_reduce(torch.ones(4, dtype=torch.int32), codec)
    with raises(TypeError, "Double", "float32"):
        all_reduce(torch.ones(4, dtype=torch.float64), codec)
    with raises((TypeError, ValueError, NotImplementedError), "Sparse"):
        all_reduce(torch.eye(4).to_sparse(), codec)
    with raises(ValueError, "max", "sum or avg"):
        all_reduce(torch.ones(4), codec, op=dist.ReduceOp.MAX)
    with raises(TypeError, "expected a codec"):
        all_reduce(torch.ones(4), compression.TopK)  # type: ignore[arg-type]
    with raises(ValueError, "the state was made for top_k", "block_quant"):
        all_reduce(torch.ones(4), BlockQuant(4), state=State(codec))
    with raises(TypeError, "state is TopK", "expected State("):
        all_reduce(torch.ones(4), codec, state=codec)  # type: ignore[arg-type]
    group = dist.new_group(backend="zeropg")
    with raises(ValueError, "another process group"):
        all_reduce(torch.ones(4), codec, state=State(codec), group=group)


def test_parameters_that_no_codec_takes_are_refused_where_they_are_given() -> None:
    for make, words in (
        (lambda: compression.TopK(0), "ratio"),
        (lambda: compression.TopK(1.5), "ratio"),
        (lambda: compression.TopK(float("nan")), "ratio"),
        (lambda: compression.TopK(0.1, value_bits=7), "value_bits"),
        (lambda: compression.RandomK(0), "ratio"),
        (lambda: compression.OneBit(block=100), "multiple of 64"),
        (lambda: compression.OneBit(block=192, rotate=True), "power of two"),
        (lambda: compression.OneBit(entropy=True), "signs have nothing to save"),
        (lambda: compression.TwoBit(entropy=2), "True or False"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


@on_ranks(2)
def test_ranks_with_different_codecs_are_told_so() -> None:
    codec: Any = compression.TopK(0.01) if dist.get_rank() == 0 else compression.OneBit()
    with raises(RuntimeError, "top_k", "one_bit", "different calls"):
        all_reduce(torch.ones(64), codec, group=dist.new_group(backend="zeropg"))
    with raises(RuntimeError, "another codec", "different calls"):
        all_reduce(torch.ones(64), codec, group=group_on_hosts("a,b"))
    apart = group_on_hosts("a,b")
    with raises(RuntimeError, "different calls", "all_reduce(Float, sum, 256 bytes) as"):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(64), group=apart)
        else:
            all_reduce(torch.ones(64), codec, group=apart)
