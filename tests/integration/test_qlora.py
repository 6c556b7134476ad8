"""QLoRA: adapters train beside frozen weights of 4 bits, which stay 4 bits on every rank and on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import BACKENDS, STAGES, close, on_ranks

pytest.importorskip("bitsandbytes")

WIDTH = 64


class Adapted(nn.Module):
    """A linear layer of 4 bits with an adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        import bitsandbytes

        base = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        self.base = base.to("cpu").requires_grad_(False)  # which quantizes the weight
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(3)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: Any, steps: int, x: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def expected_losses(x: torch.Tensor) -> list[float]:
    plain = make_model()
    return train(plain, make_optimizer(plain), 6, x)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS, timeout=120)
def test_adapters_train_beside_a_base_of_4_bits(stage: int, tmp_path: Path) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = expected_losses(x)
    model = make_model()
    weight = model[0].base.weight
    zeropg.fully_shard(model, stage=stage)
    assert model[0].base.weight is weight and weight.quant_state is not None and weight.dtype == torch.uint8
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    losses = train(model, optimizer, 3, x)
    zeropg.save_checkpoint(tmp_path, model, optimizer)
    losses += train(model, optimizer, 3, x)
    assert close(torch.tensor(losses), torch.tensor(expected), 1e-5)
    # What is resident: half a byte per element of the base, sharded in stage 3; and of the adapters fp32.
    base, adapters = 3 * WIDTH * WIDTH // 2, 3 * 4 * (2 * 4 * WIDTH + WIDTH)
    held = model._zeropg.memory_report()["parameters"]
    assert held <= (base + adapters + 4096) / (dist.get_world_size() if stage == 3 else 1)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    # On, in another stage, over a model that has the same base.
    other = make_model()
    zeropg.fully_shard(other, stage=3 - stage)
    other_optimizer = zeropg.shard_optimizer(make_optimizer(other), other)
    zeropg.load_checkpoint(tmp_path, other, other_optimizer)
    assert close(torch.tensor(train(other, other_optimizer, 3, x)), torch.tensor(expected[3:]), 1e-5)
    loss = other(x).square().mean().item()
    whole = zeropg.full_state_dict(other)
    if dist.get_rank() == 0:
        plain = make_model()
        plain.load_state_dict(whole, strict=False)  # bitsandbytes saves its scales and does not load them
        assert close(plain(x).square().mean(), torch.tensor(loss), 1e-6)
