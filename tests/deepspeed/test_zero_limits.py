"""Keys that say how much stays whole, and how wide states and frozen weights are, in a real engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.deepspeed.training import BATCH, batches, make_engine, own_parts, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_model
from tests.spawn import RankPool, SeparateHosts
from zeropg import deepspeed
from zeropg.deepspeed.tensor_access import safe_get_full_optimizer_state

HPZ = {"stage": 3, "zero_hpz_partition_size": 2}
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def gathers_of_a_step(engine: Any) -> Counter[str]:
    """How often each unit is gathered in the last of some steps."""
    data = batches()
    train(engine, data[:2])
    engine.module._zeropg.start_log()
    train(engine, data[2:3])
    events, _ = engine.module._zeropg.stop_log()
    return Counter(unit for kind, unit, *_ in events if kind == "gather")


def train_with_and_without() -> list[tuple[list[float], Counter[str]]]:
    torch.set_num_threads(1)
    numel = sum(parameter.numel() for parameter in make_model().blocks[0].parameters())
    root = sum(parameter.numel() for parameter in make_model().parameters()) - 3 * numel
    results = []
    for zero in (
        {"stage": 3},
        HPZ,
        HPZ | {"stage3_max_live_parameters": root + 2 * numel, "stage3_prefetch_bucket_size": 0},
        {"stage": 3, "stage3_param_persistence_threshold": numel},
    ):
        losses = train(make_engine(3, zero_optimization=zero), batches())
        results.append((losses, gathers_of_a_step(make_engine(3, zero_optimization=zero))))
    return results


def test_a_node_keeps_a_copy_for_the_backward(rank_pool: Callable[..., RankPool]) -> None:
    for of_rank in rank_pool(4, "zeropg", SeparateHosts(hosts=(0, 0, 1, 1))).run(train_with_and_without, timeout=120):
        losses, gathers = zip(*of_rank, strict=True)
        assert all(one == losses[0] for one in losses)
        assert gathers[0] == {"": 1, **dict.fromkeys(BLOCKS, 2)}
        assert gathers[1] == gathers[3] == dict.fromkeys(("", *BLOCKS), 1)
        assert gathers[2] == {"": 1, "blocks.0": 2, "blocks.1": 1, "blocks.2": 1}


@on_ranks(2, backend="gloo")
def test_a_rank_alone_keeps_what_its_second_shard_would_take() -> None:
    gathers = gathers_of_a_step(make_engine(3, zero_optimization=HPZ))
    model = make_model()
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    kept = sum(parameter.numel() for parameter in model.parameters()) // 2 // block
    assert 0 < kept < len(BLOCKS)
    assert gathers == {"": 1, **{name: 1 if index >= 3 - kept else 2 for index, name in enumerate(BLOCKS)}}


def gathers_of_encoded_weights() -> list[Counter[str]]:
    torch.set_num_threads(1)
    zero = HPZ | {"zero_quantized_weights": True}
    return [
        gathers_of_a_step(make_engine(3, zero_optimization=zero, **more)) for more in ({}, {"bf16": {"enabled": True}})
    ]


def test_ranks_that_round_for_themselves_keep_their_share(rank_pool: Callable[..., RankPool]) -> None:
    for whole, rounded in rank_pool(4, "zeropg", SeparateHosts(hosts=(0, 0, 1, 1))).run(gathers_of_encoded_weights):
        assert len(set(whole.values())) == 1
        assert rounded["blocks.0"] == 2 * rounded["blocks.2"]


def bf16_configuration(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": BATCH, "bf16": {"enabled": True, "bf16_optimizer_states": True}} | more


@on_ranks(2)
def test_states_of_adam_in_16_bits() -> None:
    data = batches()
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    for stage in (1, 3):
        config = bf16_configuration(optimizer=optimizer, zero_optimization={"stage": stage})
        engine, *_ = deepspeed.initialize(model=make_model(), config=config)
        losses = train(engine, data)
        assert losses[-1] < losses[0]
        moment = safe_get_full_optimizer_state(engine.module.norm.weight, "exp_avg")
        assert torch.equal(moment, moment.bfloat16().to(moment.dtype))
        assert engine.bf16_optimizer_states() is True
    model = make_model()
    with raises(ValueError, "the AdamW that was passed", "state_bits=16"):
        deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=bf16_configuration())


@on_ranks(2)
def test_frozen_weights_in_8_bits() -> None:
    data = batches()
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_batch_size": BATCH, "optimizer": optimizer, "zero_optimization": zero}
    model = make_model(seed=dist.get_rank())
    frozen = [layer for block in model.blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in frozen:
        layer.weight.requires_grad_(False)
    plain = make_model(seed=0)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    packed = {name for name, parameter in engine.module.named_parameters() if parameter.dtype == torch.uint8}
    assert len(packed) == len(frozen) and all(name.endswith("packed_weight") for name in packed)
    part = own_parts(data[0], 1)[0]
    assert abs(loss_of(engine, part) - loss_of(plain, part)) < 0.05
    losses = train(engine, data)
    assert losses[-1] < losses[0]
    with raises(ValueError, "zero_quantized_nontrainable_weights is true", "freeze the model first"):
        deepspeed.initialize(model=make_model(), config=config)
