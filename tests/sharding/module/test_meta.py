"""A model on `meta` gets memory unit by unit, and no rank ever holds all of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.memory import held_bytes
from tests.sharding.ranks import equal, on_ranks, raises
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


class Parent(nn.Module):
    """Sets what its child has, after the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        nn.init.constant_(self.child.weight, 3.0)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("ids", torch.arange(4))


def parts_keep_their_values() -> None:
    # What was loaded before stays, and so does a tied weight that another owner would set again.
    loaded = nn.Linear(4, 4)
    with torch.no_grad():
        loaded.weight.fill_(7)
    loaded.bias = nn.Parameter(torch.empty(4, device="meta"))
    model = zeropg.fully_shard(nn.Sequential(loaded))
    state = zeropg.full_state_dict(model, rank0_only=False)
    assert (state["0.weight"] == 7).all() and (state["0.bias"] != 0).all()
    with torch.device("meta"):
        tied = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
        tied[1].weight = tied[0].weight
    zeropg.fully_shard(tied)
    assert zeropg.full_state_dict(tied, rank0_only=False)["0.weight"].std() > 0.8  # the embedding's, as torch builds it
    # Parents come after their children; a buffer that two modules share stays one.
    with torch.device("meta"):
        parent = Parent()
    state = zeropg.full_state_dict(zeropg.fully_shard(parent), rank0_only=False)
    assert (state["child.weight"] == 3).all() and (state["scale"] == 2).all()
    with torch.device("meta"):
        norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        norms[1].running_mean = norms[0].running_mean
    zeropg.fully_shard(norms)
    assert norms[0].running_mean is norms[1].running_mean
    # Values that nobody gives, of whole numbers too.
    with torch.device("meta"):
        counting = nn.Sequential(Counting())
    with raises(ValueError, "0.ids was on the meta device", "reset_parameters"):
        zeropg.fully_shard(counting)


def test_what_has_values_keeps_them(rank_pool) -> None:
    rank_pool(2, "zeropg").run(parts_keep_their_values)


def models_of_hugging_face_use_their_own_values() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=211, n_positions=32)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    zeropg.fully_shard(model)
    state = zeropg.full_state_dict(model, rank0_only=False)
    assert abs(state["transformer.wte.weight"].std() - config.initializer_range) < 0.002
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = torch.arange(16).view(2, 8)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()


def test_models_of_hugging_face_get_their_own_values(rank_pool) -> None:
    rank_pool(2, "zeropg").run(models_of_hugging_face_use_their_own_values)


class Failing(nn.Linear):
    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")
        super().reset_parameters()


def one_rank_fails() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(Failing(3, 3)))
    if dist.get_rank() == 1:
        with raises(
            RuntimeError, "Failing.reset_parameters() of '1.0' raised OSError: the disk is gone", "build it again"
        ):
            zeropg.fully_shard(model, units=["0", "1"])
    else:
        with raises(RuntimeError, "rank 1 could not make the parameters of unit '1'", "build it again"):
            zeropg.fully_shard(model, units=["0", "1"])
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == 2


@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
def test_what_one_rank_raises_is_an_error_on_all(rank_pool, backend: str) -> None:
    rank_pool(2, backend).run(one_rank_fails)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_hooks_and_attributes_of_parameters_stay(stage: int) -> None:
    with torch.device("meta"):
        model = Model(width=8, blocks=2)
    calls: list[str] = []
    weight, bias = model.first.weight, model.first.bias
    weight.no_decay = True
    weight.register_hook(lambda gradient: calls.append("gradient"))
    weight.register_hook(lambda gradient: 0 * gradient)
    bias.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    zeropg.fully_shard(model, stage=stage, device="cpu")
    model(torch.randn(4, 8)).square().sum().backward()
    assert sorted(calls) == ["accumulated", "gradient"] and weight.no_decay and model.first.weight is weight
    with zeropg.full_gradients(model):
        assert not weight.grad.any() and bias.grad is not None
