"""Several optimizers on one sharded model: each keeps state for what it holds, and they train as one would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import BACKENDS, STAGES, equal, on_ranks
from tests.small_gpt import loss_of, make_batches, make_model

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
}


def split_by_parameter(model: nn.Module) -> list[list[nn.Parameter]]:
    """Neighbours in every flat buffer go to different optimizers."""
    parameters = list(model.parameters())
    return [parameters[index::3] for index in range(3)]


def split_by_module(model: Any) -> list[list[nn.Parameter]]:
    """As a frozen trunk's head, or a generator and its discriminator."""
    blocks = set(model.blocks.parameters())
    return [list(blocks), [p for p in model.parameters() if p not in blocks]]


def state_bytes(optimizers: Sequence[Any]) -> int:
    """Of the memory behind all state tensors, not of the views that users see."""
    storages = {}
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            for value in entries.values():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def train(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: int = 3) -> dict[str, torch.Tensor]:
    for batch in make_batches(steps):
        loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return zeropg.full_state_dict(model, rank0_only=False)


@pytest.mark.filterwarnings("ignore:.*no param group holds")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_together_they_keep_the_state_of_one_and_train_to_the_same_bits(stage: int, maker: str) -> None:
    make = MAKERS[maker]
    for options in ({}, {"param_dtype": torch.bfloat16}):
        for split in (split_by_parameter, split_by_module):
            model = zeropg.fully_shard(make_model(), stage=stage, **options)
            groups = [{"params": parameters} for parameters in split(model)]
            one = zeropg.shard_optimizer(make(groups), model)
            wanted = train(model, [one])
            model = zeropg.fully_shard(make_model(), stage=stage, **options)
            several = [zeropg.shard_optimizer(make(parameters), model) for parameters in split(model)]
            found = train(model, several)
            assert all(equal(found[name], value) for name, value in wanted.items())
            # Padding between parameters is nobody's.
            assert state_bytes(several) <= state_bytes([one]), (state_bytes(several), state_bytes([one]))
            for optimizer in several:
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                names = {name for name, p in model.named_parameters() if id(p) in held}
                assert optimizer.local_ranges().keys() <= names
                assert {shard.name for shard in optimizer.local_state()} <= names
            whole = {}
            for optimizer in several:
                whole |= zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
            single = zeropg.full_optimizer_state_dict(one, rank0_only=False)["state"]
            assert whole.keys() == single.keys()
            for name, entries in single.items():
                assert all(torch.equal(torch.as_tensor(whole[name][k]), torch.as_tensor(v)) for k, v in entries.items())


@pytest.mark.filterwarnings("ignore:.*no param group holds")
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_state_of_a_group_that_is_added_later_comes_with_it(stage: int) -> None:
    for make in MAKERS.values():
        model = zeropg.fully_shard(make_model(), stage=stage)
        first, second, third = split_by_parameter(model)
        optimizer = zeropg.shard_optimizer(make(first), model)
        train(model, [optimizer])
        before = state_bytes([optimizer])
        kept = {name: (start, stop) for name, (start, stop) in optimizer.local_ranges().items()}
        optimizer.add_param_group({"params": second})
        assert state_bytes([optimizer]) == before, "only a step makes state"
        assert optimizer.local_ranges().items() >= kept.items()
        train(model, [optimizer])
        saved = optimizer.state_dict()
        assert sum(map(len, (g["params"] for g in saved["param_groups"]))) == len(first) + len(second)
        optimizer.load_state_dict(saved)
        steps = {int(number) for name, key, number in optimizer.local_scalars() if key == "step"}
        assert steps <= {3, 6}
        assert not {id(p) for p in third} & {id(p) for p in optimizer.state}
