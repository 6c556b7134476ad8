"""FSDP2 with compressed gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW

from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import SmallGPT, loss_of, make_batches, make_model
from zeropg.compression import BlockQuant, Codec, Fsdp2ReduceScatter


def make_sharded(codec: Codec | None, policy: MixedPrecisionPolicy | None = None) -> tuple[SmallGPT, list[FSDPModule]]:
    model = make_model()
    options = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fsdp2(block, **options)
    fsdp2(model, **options)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if codec is not None:
        for module in modules:
            module.set_custom_reduce_scatter(Fsdp2ReduceScatter(codec))
    return model, modules


def train(model: SmallGPT, steps: int = 20) -> list[float]:
    optimizer = AdamW(model.parameters(), lr=4e-3)
    losses = []
    for batch in make_batches(steps):
        loss = loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    return losses


@pytest.mark.parametrize(("codec", "tolerance"), [(BlockQuant(8), 0.02), (BlockQuant(4), 0.08)], ids=str)
@on_ranks(2)
def test_fsdp2_learns_as_without_compression(codec: Codec, tolerance: float) -> None:
    expected = train(make_sharded(None)[0])
    losses = train(make_sharded(codec)[0])
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=tolerance), (losses, expected)
    assert losses[-1] < 0.8 * losses[0]


@on_ranks(2)
def test_gradients_in_16_bits_are_refused_and_in_fp32_taken() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with raises(TypeError, "BFloat16", "float32"):
        train(make_sharded(BlockQuant(4), policy)[0], 1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses = train(make_sharded(BlockQuant(4), policy)[0], 10)
    assert losses[-1] < losses[0]
