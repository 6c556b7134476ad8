"""A model on `meta` gets memory unit by unit, and no rank ever holds all of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.memory import held_bytes
from tests.sharding.ranks import equal, raises
from tests.small_gpt import make_optimizer

WIDTH = 1024
BLOCKS = 16
BLOCK_BYTES = 4 * WIDTH * WIDTH
held: list[int] = []


class Block(nn.Linear):
    """Says what its process holds when it has its values."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        held.append(held_bytes())


class Model(nn.Module):
    """Its head shares its weight with the last block, and its scale comes last of all."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, width, bias=False) for _ in range(blocks))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.blocks[-1].weight
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(self.head(x))


def shard_a_large_model(stage: int) -> None:
    with torch.device("meta"):
        model = Model()
    dist.broadcast(torch.zeros(WIDTH, WIDTH), 0)  # the group's own memory is there
    held.clear()
    before = held_bytes()
    zeropg.fully_shard(model, stage=stage, device="cpu")
    shard = BLOCKS * BLOCK_BYTES / (dist.get_world_size() if stage == 3 else 1)
    # A block twice, while it is taken over; and what allocator and interpreter keep.
    assert max(held) - before < shard + 3 * BLOCK_BYTES + (4 << 20), [(h - before) >> 20 for h in held]
    assert held_bytes() - before < shard + 2 * BLOCK_BYTES + (4 << 20)


@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
@pytest.mark.parametrize("stage", [1, 3])
def test_no_more_than_shards_and_a_unit_are_in_memory(rank_pool, backend: str, stage: int) -> None:
    rank_pool(2, backend).run(shard_a_large_model, stage)


def values_are_those_of_a_plain_model() -> None:
    torch.manual_seed(3 + dist.get_rank())
    plain = Model(8, 3)
    torch.manual_seed(3)
    for module in plain.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for stage in range(4):
        with torch.device("meta"):
            model = Model(8, 3)
        named = dict(model.named_parameters())
        optimizer = make_optimizer(model)
        torch.manual_seed(3)
        zeropg.fully_shard(model, stage=stage)
        state = zeropg.full_state_dict(model, rank0_only=False)
        shared = ("blocks.2.weight", "head.weight")  # by the block alone; the plain model's head sets it once more
        assert all(equal(state[name], value) for name, value in plain.state_dict().items() if name not in shared)
        assert all(model.get_parameter(name) is parameter for name, parameter in named.items())
        assert model.head.weight is model.blocks[-1].weight
        sharded = zeropg.shard_optimizer(optimizer, model)
        model(torch.ones(4, 8)).square().mean().backward()
        sharded.step()
        after = zeropg.full_state_dict(model, rank0_only=False)
        assert not equal(after["blocks.0.weight"], state["blocks.0.weight"])


@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
def test_values_are_those_that_modules_give_themselves(rank_pool, backend: str) -> None:
    rank_pool(2, backend).run(values_are_those_of_a_plain_model)


def devices_that_cannot_be() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with raises(ValueError, "device is 'meta'", "a device that has memory"):
        zeropg.fully_shard(model, device="meta")
    mixed = nn.Sequential(nn.Linear(2, 2), model)
    zeropg.fully_shard(mixed, device="cpu")
    assert zeropg.full_state_dict(mixed, rank0_only=False)["1.weight"].isfinite().all()


def test_devices_that_cannot_be_used_are_refused(rank_pool) -> None:
    rank_pool(2, "zeropg").run(devices_that_cannot_be)
