"""Optimizers and compression on a mesh of replicas."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeropg
from tests.optim.test_layerwise_sharded import MAKERS
from tests.optim.test_momentum_optimizers import dgc, one_bit_adam, one_bit_lamb
from tests.sharding.hybrid.training import (
    TWO_HOSTS,
    assert_replicas_are_equal,
    make_mesh,
    over_gloo_in_soak,
    own_part,
    shard,
    step,
)
from tests.sharding.ranks import close, equal, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import Place
from zeropg.compression import BlockQuant


def train(model: nn.Module, optimizer: Any, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    for batch in batches:
        loss_of(model, own_part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_replicas_are_equal(model)
    return zeropg.full_state_dict(model, rank0_only=False)


def step_whole_layers(alone: tuple[int, ...]) -> None:
    """In every stage on two shards, and in some where each rank has a shard alone."""
    batches = make_batches()[:4]
    meshes = {make_mesh(): (0, 1, 2, 3), make_mesh(4, 1): alone}
    for name, make in MAKERS.items():
        plain = make_model(torch.float64)
        optimizer = make(plain)
        for batch in batches:
            loss_of(plain, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for mesh, stages in meshes.items():
            for stage in stages:
                model = shard(make_model(torch.float64), mesh, stage=stage)
                state = train(model, zeropg.shard_optimizer(make(model), model), batches)
                for key, value in plain.named_parameters():
                    assert close(state[key], value.detach(), 1e-9), (name, stage, key)


@pytest.mark.parametrize("alone", [(2,), pytest.param((0, 1, 3), marks=pytest.mark.soak)], ids=str)
@over_gloo_in_soak
def test_layerwise_optimizers_step_as_in_one_process(
    rank_pool, backend: str, place: Place, alone: tuple[int, ...]
) -> None:
    rank_pool(4, backend, place).run(step_whole_layers, alone)


def clear_a_gradient_on_one_replica() -> None:
    import torch.distributed as dist

    for make in MAKERS.values():
        model = shard(make_model(), stage=2)
        optimizer = zeropg.shard_optimizer(make(model), model)
        loss_of(model, own_part(make_batches()[0])).backward()
        if dist.get_rank() >= 2:
            model.blocks[0].up.weight.grad = None
        with raises(RuntimeError, "rank 2 steps with gradients of other parameters", "nothing was stepped"):
            optimizer.step()


def test_gradients_that_one_replica_lacks_are_an_error_on_all_ranks(rank_pool) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(clear_a_gradient_on_one_replica)


FEW_MOMENTA = ((one_bit_adam, 0), (one_bit_adam, 1), (one_bit_lamb, 1), (dgc, 0))
OTHER_MOMENTA = ((one_bit_lamb, 0), (dgc, 1))


def average_momenta(cases: tuple[tuple[Any, int], ...]) -> None:
    """Momenta are averaged over all ranks: the mesh says only who updates which weights."""
    mesh, batches = make_mesh(), make_batches(16)
    for make, stage in cases:
        states = []
        for options in ({}, {"mesh": mesh}):
            model = zeropg.fully_shard(make_model(), stage=stage, **options)
            states.append(train(model, zeropg.shard_optimizer(make(model), model), batches))
        # Norms of layers are summed over two shards, not four.
        assert all(close(states[1][name], value, 1e-5) for name, value in states[0].items()), (make, stage)
        model = shard(make_model(), mesh, stage=2)
        with raises(NotImplementedError, "the model has stage 2"):
            zeropg.shard_optimizer(make(model), model)


@pytest.mark.parametrize(
    "cases", [FEW_MOMENTA, pytest.param(OTHER_MOMENTA, marks=pytest.mark.soak)], ids=["few", "rest"]
)
def test_optimizers_that_average_momenta_train_as_without_replicas(rank_pool, cases) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(average_momenta, cases, timeout=120)


def compress(folder: Path, stages: tuple[int, ...]) -> None:
    mesh, batches = make_mesh(), make_batches()
    for stage in stages:
        losses: dict[str, list[float]] = {}
        for name, codec in {"plain": None, "encoded": BlockQuant(4)}.items():
            model = shard(make_model(), mesh, stage=stage, compression=codec)
            optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
            losses[name] = [step(model, optimizer, batch) for batch in batches[:20]]
            assert_replicas_are_equal(model)
        assert losses["encoded"] != losses["plain"]
        assert losses["encoded"][-1] == pytest.approx(losses["plain"][-1], rel=0.08)
        # Each rank encodes its slice, or what it sends of the whole, and owes that much.
        numel = sum(p.numel() for p in model.parameters())
        assert 0 < model._zeropg.memory_report()["residuals"] <= 4 * 1.1 * numel / (2 if stage >= 2 else 1)
        zeropg.save_checkpoint(folder / str(stage), model, optimizer)
        resumed = shard(make_model(seed=9), mesh, stage=stage, compression=BlockQuant(4))
        resumed_optimizer = zeropg.shard_optimizer(make_optimizer(resumed), resumed)
        zeropg.load_checkpoint(folder / str(stage), resumed, resumed_optimizer)
        for batch in batches[20:23]:
            assert step(model, optimizer, batch) == step(resumed, resumed_optimizer, batch)
        expected, state = (zeropg.full_state_dict(one, rank0_only=False) for one in (model, resumed))
        assert all(equal(state[name], value) for name, value in expected.items())
        # Without replicas each rank encodes another part.
        alone = zeropg.fully_shard(make_model(), stage=stage, compression=BlockQuant(4))
        optimizer = zeropg.shard_optimizer(make_optimizer(alone), alone)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zeropg.load_checkpoint(folder / str(stage), alone, optimizer)
        said = [str(warning.message) for warning in caught if "4 ranks (2 replicas)" in str(warning.message)]
        assert len(said) == (alone._zeropg.rank == 0)
        assert alone._zeropg.memory_report()["residuals"] == 0


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.soak)], ids=str)
def test_gradients_travel_encoded_between_replicas(rank_pool, tmp_path: Path, stages: tuple[int, ...]) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(compress, tmp_path, stages, timeout=120)
