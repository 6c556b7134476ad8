"""Reductions with a codec between real processes: the reference's bits, on every rank."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compression.reference import Reference
from tests.sharding.ranks import on_ranks, raises
from zeropg import compression
from zeropg._native import _C
from zeropg.compression import BlockQuant


def backend() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def inputs_of_all(numel: int, step: int) -> list[torch.Tensor]:
    """Everybody's gradients, on every rank."""
    return [
        torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)).pow(3)
        for rank in range(dist.get_world_size())
    ]


def all_reduce(tensor: torch.Tensor, codec: BlockQuant, residuals: Any, **changes: Any) -> Any:
    ranges = [("weight", 0, tensor.numel())]
    arguments = {"ranges": ranges, "op": dist.ReduceOp.AVG, "async_op": False, **changes}
    return _C.compressed_all_reduce(backend(), tensor, codec.make_compressor(), residuals, **arguments)


CODECS = [BlockQuant(8), BlockQuant(4), BlockQuant(4, block=32, error_feedback=False)]


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 70_001, 1_000_000])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@on_ranks(3)
def test_all_reduce_gives_the_reference_on_every_rank(codec: BlockQuant, numel: int) -> None:
    reference = Reference(codec, dist.get_world_size(), numel)
    residuals = codec.make_residuals()
    for step in range(3):
        inputs = inputs_of_all(numel, step)
        mine = inputs[dist.get_rank()].clone()
        all_reduce(mine, codec, residuals)
        assert torch.equal(mine, reference.all_reduce(inputs, codec.block)), step


FE_TONEAREST, FE_UPWARD = 0, 0x800  # of <fenv.h> on x86-64


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of <fenv.h>")
@on_ranks(3)
def test_results_do_not_depend_on_how_a_thread_rounds() -> None:
    libm = ctypes.CDLL("libm.so.6")
    inputs = inputs_of_all(1000, 0)
    results = []
    for rounding in (FE_TONEAREST, FE_TONEAREST if dist.get_rank() == 1 else FE_UPWARD):
        mine = inputs[dist.get_rank()].clone()
        libm.fesetround(rounding)
        all_reduce(mine, CODECS[0], CODECS[0].make_residuals())
        libm.fesetround(FE_TONEAREST)
        results.append(mine)
    assert torch.equal(*results)


@pytest.mark.parametrize("block_numel", [1, 32, 5000, 300_000])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@on_ranks(3)
def test_reduce_scatter_gives_the_reference(codec: BlockQuant, block_numel: int) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    reference = Reference(codec, world_size, world_size * block_numel)
    residuals = codec.make_residuals()
    output = torch.empty(block_numel)
    for step in range(3):
        inputs = inputs_of_all(world_size * block_numel, step)
        _C.compressed_reduce_scatter(
            backend(),
            output,
            inputs[rank],
            codec.make_compressor(),
            residuals,
            [("weight", 0, world_size * block_numel)],
            dist.ReduceOp.AVG,
            async_op=True,
        ).wait()
        assert torch.equal(output, reference.reduce_scatter(inputs)[rank]), step


@on_ranks(2)
def test_residuals_belong_to_names_whatever_the_bucket() -> None:
    """One contribution in two buckets: what the first lost of a name is in what the second sends of it."""
    codec = BlockQuant(4, block=32)
    size, rank = 320, dist.get_rank()
    residuals = codec.make_residuals()
    assert residuals is not None
    a, b = torch.randn(2, size, generator=torch.Generator().manual_seed(rank))
    padding = torch.zeros(32)
    all_reduce(torch.cat([a, b]), codec, residuals, ranges=[("a", 0, size), ("b", 0, size)])
    kept = {(name, hop): values.clone() for name, hop, start, values in residuals.segments() if start == 0}
    # Rank 0 owns the first bucket's first half, which is a, and encodes b for rank 1; rank 1 the other way round.
    theirs = "b" if rank == 0 else "a"
    assert kept.keys() == {(theirs, 0), ("a" if rank == 0 else "b", 1)}
    # In a bucket of its own between paddings only its second half is rank 1's.
    all_reduce(torch.cat([padding, b, padding]), codec, residuals, ranges=[("", 0, 32), ("b", 0, size), ("", 0, 32)])
    if rank == 0:
        after = next(values for name, hop, start, values in residuals.segments() if (name, hop, start) == ("b", 0, 0))
        half = size // 2
        expected = kept["b", 0].clone()
        codec.make_compressor().encode(torch.cat([b[half:], padding]), whole := torch.cat([expected[half:], padding]))
        assert torch.equal(after[half:], whole[: size - half])
        # Of its first half this rank encodes nothing any more: that is added to the next contribution as it is.
        assert not after[:half].any()
        [(start, owed)] = [
            (start, values) for name, hop, start, values in residuals.segments() if (name, hop) == ("b", 2)
        ]
        assert start == 0 and torch.equal(owed, expected[:half])


@on_ranks(2)
def test_segments_are_loaded_as_they_were() -> None:
    codec = BlockQuant(4)
    numel = 5000
    stores = [codec.make_residuals(), codec.make_residuals()]
    results = []
    for which, store in enumerate(stores):
        assert store is not None
        if which == 1:
            for name, hop, start, values in stores[0].segments():
                store.load(name, hop, start, values)
            assert store.bytes == stores[0].bytes
        for step in range(3 * which, 3 * which + 3):
            if which == 1:
                twin = inputs_of_all(numel, step)[dist.get_rank()]
                all_reduce(twin, codec, stores[0])
                results.append(twin)
            mine = inputs_of_all(numel, step)[dist.get_rank()]
            all_reduce(mine, codec, store)
            if which == 1:
                assert torch.equal(mine, results[-1])


@on_ranks(2)
def test_a_nan_is_seen_by_all_and_leaves_residuals_clean() -> None:
    codec = BlockQuant(4)
    residuals = codec.make_residuals()
    assert residuals is not None
    for step, bad in enumerate([0.0, float("nan"), float("inf"), 0.0]):
        mine = inputs_of_all(4096, step)[dist.get_rank()]
        if dist.get_rank() == 1:
            mine[1000] += bad
        all_reduce(mine, codec, residuals)
        assert mine[1000].isfinite() == (bad == 0.0)
        assert mine.isfinite().sum() >= 4096 - 256
        assert all(values.isfinite().all() for *_, values in residuals.segments())


@on_ranks(2)
def test_other_dtypes_operations_and_ranges_are_refused_and_the_group_goes_on() -> None:
    codec = BlockQuant(8)
    tensor = torch.ones(64)
    with raises(TypeError, "Long", "float32"):
        all_reduce(tensor.long(), codec, None)
    with raises(ValueError, "max", "expected sum or avg"):
        all_reduce(tensor, codec, None, op=dist.ReduceOp.MAX)
    with raises(ValueError, "63 elements", "64"):
        all_reduce(tensor, codec, codec.make_residuals(), ranges=[("weight", 0, 63)])
    with raises(ValueError, "start -1"):
        all_reduce(tensor, codec, codec.make_residuals(), ranges=[("weight", -1, 64)])
    all_reduce(tensor, codec, None)
    torch.testing.assert_close(tensor, torch.ones(64), atol=0.005, rtol=0)


@on_ranks(2)
def test_ranks_with_different_codecs_are_told_so() -> None:
    codec = BlockQuant(4 if dist.get_rank() == 0 else 8)
    group = dist.new_group(backend="zeropg")
    tensor = torch.ones(64)
    with raises(RuntimeError, "block_quant(bits=4, block=256)", "block_quant(bits=8, block=256)", "different calls"):
        _C.compressed_all_reduce(
            group._get_backend(torch.device("cpu")),
            tensor,
            codec.make_compressor(),
            None,
            [],
            dist.ReduceOp.AVG,
            async_op=False,
        )


@on_ranks(2, backend="gloo")
def test_groups_of_other_backends_are_refused() -> None:
    with raises(ValueError, "State", "gloo", "zeropg"):
        compression.State(BlockQuant(4))


def test_codecs_check_their_parameters() -> None:
    with pytest.raises(ValueError, match="expected 4 or 8"):
        BlockQuant(3)
    with pytest.raises(ValueError, match="a multiple of 32"):
        BlockQuant(4, block=100)
    assert str(BlockQuant(4)) == "block_quant(bits=4, block=256) with error feedback"
    assert str(BlockQuant(error_feedback=False)) == "block_quant(bits=8, block=256)"
    with pytest.raises(ValueError, match="not finite"):
        _C.ResidualStore().load("weight", 0, 0, torch.tensor([float("nan")]))
    with pytest.raises(TypeError, match="float32"):
        _C.ResidualStore().load("weight", 0, 0, torch.zeros(3, dtype=torch.float64))
