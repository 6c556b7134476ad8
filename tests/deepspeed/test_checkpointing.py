"""`deepspeed.checkpointing`: what a backward runs again, where its inputs wait, and how that is configured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg.deepspeed as deepspeed
from tests.sharding.ranks import equal, on_ranks, raises

CONFIGS: list[dict[str, Any]] = [
    {},
    {"cpu_checkpointing": True},
    {"partition_activations": True, "cpu_checkpointing": True},
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.recomputes else block(x)
        return x.square().mean()


def losses(recomputes: bool, stage: int) -> list[float]:
    model = Model()
    model.recomputes = recomputes
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    result = []
    torch.manual_seed(7)
    for _ in range(4):
        loss = engine(torch.randn(4, 8))
        engine.backward(loss)
        engine.step()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_losses_are_those_without_it(stage: int) -> None:
    expected = losses(False, stage)
    for block in CONFIGS:
        deepspeed.checkpointing.configure(None, deepspeed_config={"activation_checkpointing": block})
        assert losses(True, stage) == expected, block
        deepspeed.checkpointing.reset()  # as programs do between evaluations
        assert deepspeed.checkpointing.is_configured()
        assert losses(True, stage) == expected, block


@on_ranks(2)
def test_arguments_win_and_mistakes_are_named() -> None:
    group = dist.new_group()
    mpu = SimpleNamespace(get_model_parallel_group=lambda: group)
    args = SimpleNamespace(deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    deepspeed.checkpointing.configure(mpu, deepspeed_config=args, partition_activations=True)
    x = torch.ones(3, 5, requires_grad=True)
    deepspeed.checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert equal(x.grad, torch.cos(torch.ones(3, 5)))
    with raises(ValueError, "partition_activation"):
        deepspeed.checkpointing.configure(deepspeed_config={"activation_checkpointing": {"partition_activation": True}})
    with raises(AttributeError, "deepspeed.checkpointing.get_cuda_rng_tracker is not available"):
        deepspeed.checkpointing.get_cuda_rng_tracker()
