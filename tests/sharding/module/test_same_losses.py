"""Stages 0 to 3 on 1 to 4 ranks train a GPT as one plain PyTorch process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.small_gpt import GLOBAL_BATCH, loss_of, make_batches, make_model, make_optimizer, train_plain
from tests.spawn import RankPool

STAGES = (0, 1, 2, 3)
Run = tuple[list[float], dict[str, torch.Tensor]]


def train_sharded(stage: int, dtype: torch.dtype, *, accumulate: int = 1, **options: Any) -> Run:
    """Losses of the global batch and the final whole parameters; called on every rank, the same on each."""
    import zeropg

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = zeropg.fully_shard(make_model(dtype, seed=0 if rank == 0 else 99 + rank), stage=stage, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    losses = []
    for batch in make_batches():
        total = torch.zeros((), dtype=torch.float64)
        parts = batch.chunk(world_size)[rank].chunk(accumulate)
        for part in parts:
            loss = loss_of(model, part) / accumulate
            loss.backward()
            total += loss.detach().double()
        zeropg.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    state = zeropg.full_state_dict(model, rank0_only=False)
    return losses, {name: state[name] for name, _ in model.named_parameters()}


def train_all_stages(dtypes: list[torch.dtype]) -> dict[tuple[int, torch.dtype], Run]:
    torch.set_num_threads(1)
    return {(stage, dtype): train_sharded(stage, dtype) for dtype in dtypes for stage in STAGES}


def relative_difference(a: Run, b: Run) -> float:
    losses = max(abs(x - y) / abs(y) for x, y in zip(a[0], b[0], strict=True))
    parameters = max(
        ((a[1][name].double() - b[1][name].double()).norm() / b[1][name].double().norm()).item() for name in b[1]
    )
    return max(losses, parameters)


def assert_same_bits(a: Run, b: Run) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.fixture(scope="module")
def plain() -> dict[torch.dtype, Run]:
    torch.set_num_threads(1)
    runs = {dtype: train_plain(dtype) for dtype in (torch.float32, torch.float64)}
    for losses, _ in runs.values():
        assert losses[-1] < 0.6 * losses[0], "the reference does not learn"
    return runs


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.soak) for size in (3, 4))])
def test_every_stage_trains_as_one_plain_process(world_size: int, plain: dict[torch.dtype, Run]) -> None:
    assert GLOBAL_BATCH % world_size == 0
    with RankPool(world_size) as pool:
        results = pool.run(train_all_stages, [torch.float64, torch.float32], timeout=240)
    for (stage, dtype), run in results[0].items():
        for other in results[1:]:
            assert_same_bits(other[(stage, dtype)], run)
        assert_same_bits(run, results[0][(0, dtype)])
        if dtype == torch.float64:
            bound = 1e-12
        else:
            bound = max(1e-6, 3 * relative_difference(train_plain(dtype, parts=world_size), plain[dtype]))
        assert relative_difference(run, plain[dtype]) <= bound, (stage, dtype)


def train_over(backend_note: str) -> dict[int, Run]:
    torch.set_num_threads(1)
    return {stage: train_sharded(stage, torch.float64) for stage in STAGES}


def test_every_stage_trains_over_gloo(plain: dict[torch.dtype, Run]) -> None:
    with RankPool(2, backend="gloo") as pool:
        results = pool.run(train_over, "gloo", timeout=120)
    for stage, run in results[0].items():
        assert relative_difference(run, plain[torch.float64]) <= 1e-12, stage


def train_variants() -> dict[str, dict[int, Run]]:
    torch.set_num_threads(1)
    bf16 = {"param_dtype": torch.bfloat16}
    return {
        "bf16": {stage: train_sharded(stage, torch.float32, **bf16) for stage in STAGES},
        "bf16 reduced in bf16": {
            stage: train_sharded(stage, torch.float32, reduce_dtype=torch.bfloat16, **bf16) for stage in STAGES
        },
        "accumulated": {stage: train_sharded(stage, torch.float64, accumulate=3) for stage in STAGES},
        "whole after forward": {3: train_sharded(3, torch.float64, reshard_after_forward=False)},
    }


def test_mixed_precision_and_accumulation_give_the_same_bits_in_every_stage(plain: dict[torch.dtype, Run]) -> None:
    with RankPool(2) as pool:
        results = pool.run(train_variants, timeout=240)
    for variant, runs in results[0].items():
        for stage, run in runs.items():
            if 0 in runs:
                assert_same_bits(run, runs[0])
            reference, bound = (plain[torch.float32], 0.05) if "bf16" in variant else (plain[torch.float64], 1e-12)
            if "bf16" in variant:
                assert max(abs(a - b) / b for a, b in zip(run[0], reference[0], strict=True)) < bound, (variant, stage)
            else:
                assert relative_difference(run, reference) <= bound, (variant, stage)
