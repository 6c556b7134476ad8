"""Adafactor, LAMB and Muon over models of fully_shard: every stage, other world sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import RankPool
from zeropg.optim import LAMB, Muon

Make = Callable[[nn.Module], torch.optim.Optimizer]
Weights = dict[str, torch.Tensor]


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return LAMB(model.parameters(), 2e-2, (0.9, 0.95))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """In float64, so that what ranks round differently does not grow."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    tables = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" not in n]
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    groups = [{"params": hidden, "weight_decay": 0.01}, {"params": vectors}, {"params": tables, "use_muon": False}]
    return Muon(groups, 1e-2, adjust_lr_fn="match_rms_adamw", ns_dtype="float64")


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """torch's own class: what is compared with is its own step in a plain process."""
    return torch.optim.Adafactor(model.parameters(), 2e-2, weight_decay=0.1)


MAKERS: dict[str, Make] = {"adafactor": adafactor, "lamb": lamb, "muon": muon}
each_optimizer = pytest.mark.parametrize("name", MAKERS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if hasattr(model, "_zeropg") else (0, 1)
    for batch in make_batches()[first:last]:
        loss_of(model, batch.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_sharded(name: str, stage: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    model = zeropg.fully_shard(make_model(dtype), stage=stage, **options)
    return model, zeropg.shard_optimizer(MAKERS[name](model), model)


def weights_of(model: nn.Module) -> Weights:
    state = zeropg.full_state_dict(model, rank0_only=False)
    return {name: state[name] for name, _ in model.named_parameters()}


def train_in_all_stages(name: str) -> tuple[list[Weights], Weights]:
    """Weights after 4 steps: of each stage, and of a plain model."""
    trained = []
    for stage in STAGES:
        model, optimizer = make_sharded(name, stage)
        train(model, optimizer, 0, 4)
        trained.append(weights_of(model))
    plain = make_model(torch.float64)
    train(plain, MAKERS[name](plain), 0, 4)
    return trained, {name: parameter.detach() for name, parameter in plain.named_parameters()}


@each_optimizer
@pytest.mark.parametrize(("world_size", "backend"), [*((ranks, "zeropg") for ranks in (1, 2, 3, 4)), (2, "gloo")])
def test_every_stage_trains_as_one_plain_process(
    name: str, world_size: int, backend: str, rank_pool: Callable[..., RankPool]
) -> None:
    for trained, plain in rank_pool(world_size, backend).run(train_in_all_stages, name):
        for weights in trained:
            for key, expected in plain.items():
                assert torch.equal(weights[key], trained[0][key]), f"stages differ in {key}"
                torch.testing.assert_close(weights[key], expected, rtol=1e-9, atol=1e-11)


@each_optimizer
@on_ranks(2)
def test_state_dicts_go_on_to_the_bit_with_masters_apart(name: str) -> None:
    for stage in STAGES:
        model, optimizer = make_sharded(name, stage, torch.float32, param_dtype=torch.bfloat16)
        train(model, optimizer, 0, 2)
        saved = copy.deepcopy((zeropg.full_state_dict(model, rank0_only=False), optimizer.state_dict()))
        train(model, optimizer, 2, 4)
        again, again_optimizer = make_sharded(name, stage, torch.float32, param_dtype=torch.bfloat16)
        again.load_state_dict(saved[0])
        again_optimizer.load_state_dict(saved[1])
        train(again, again_optimizer, 2, 4)
        for key, value in weights_of(again).items():
            assert torch.equal(value, weights_of(model)[key])


def save(name: str, folder: Path) -> Weights:
    model, optimizer = make_sharded(name, 3)
    train(model, optimizer, 0, 2)
    zeropg.save_checkpoint(folder, model, optimizer)
    train(model, optimizer, 2, 4)
    return weights_of(model)


def load(name: str, folder: Path, stage: int) -> Weights:
    model, optimizer = make_sharded(name, stage)
    zeropg.load_checkpoint(folder, model, optimizer)
    train(model, optimizer, 2, 4)
    return weights_of(model)


@each_optimizer
def test_checkpoints_load_at_another_world_size(name: str, tmp_path: Path, rank_pool: Callable[..., RankPool]) -> None:
    expected = rank_pool(2).run(save, name, tmp_path)[0]
    for world_size, stage in ((1, 0), (2, 1), (3, 2)):
        for key, value in rank_pool(world_size).run(load, name, tmp_path, stage)[0].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)


def full_state(stage: int) -> Any:
    model, optimizer = make_sharded("adafactor", stage)
    train(model, optimizer, 0, 2)
    return zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]


def test_the_full_state_of_adafactor_has_torchs_shapes(rank_pool: Callable[..., RankPool]) -> None:
    plain = make_model(torch.float64)
    optimizer = adafactor(plain)
    train(plain, optimizer, 0, 2)
    for stage in (0, 3):
        state = rank_pool(3).run(full_state, stage)[0]
        for name, parameter in plain.named_parameters():
            assert state[name].keys() == optimizer.state[parameter].keys()
            for key, value in optimizer.state[parameter].items():
                torch.testing.assert_close(state[name][key], value, rtol=1e-9, atol=1e-15)


def with_a_whole_parameter(folder: Path, steps: int) -> Any:
    """Adafactor's full state after a save (steps > 0) or a load (0), with a matrix that is not sharded."""
    model = make_model(torch.float64)
    model = zeropg.fully_shard(model, stage=3, ignored_params={model.blocks[0].up.weight})
    optimizer = zeropg.shard_optimizer(adafactor(model), model)
    train(model, optimizer, 0, steps)
    if steps:
        zeropg.save_checkpoint(folder, model, optimizer)
    else:
        zeropg.load_checkpoint(folder, model, optimizer)
    return zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]


def test_checkpoints_hold_rows_and_columns_of_parameters_left_whole(
    tmp_path: Path, rank_pool: Callable[..., RankPool]
) -> None:
    saved = rank_pool(2).run(with_a_whole_parameter, tmp_path, 1)[0]
    loaded = rank_pool(3).run(with_a_whole_parameter, tmp_path, 0)
    assert saved["blocks.0.up.weight"]["row_var"].any()
    for each in loaded:
        for name, entries in saved.items():
            for key, value in entries.items():
                assert torch.equal(each[name][key], value), f"{key} of {name}"


@on_ranks(2)
def test_a_matrix_that_lies_on_one_rank_alone() -> None:
    for name in ("attention", "down"):  # the first and the last of their unit
        found = []
        for stage in STAGES:
            model = zeropg.fully_shard(make_model(), stage=stage)
            with pytest.warns(UserWarning, match="no param group holds"):
                weight = getattr(model.blocks[0], name).weight
                optimizer = zeropg.shard_optimizer(torch.optim.Muon([weight], 1e-2), model)
            train(model, optimizer, 0, 2)
            found.append(weights_of(model)[f"blocks.0.{name}.weight"])
            assert torch.equal(found[-1], found[0])
        assert not torch.equal(found[0], dict(make_model().named_parameters())[f"blocks.0.{name}.weight"])


@on_ranks(2)
def test_each_matrix_is_made_orthogonal_once() -> None:
    from zeropg.optim import muon as module

    calls = []
    whole = module.newton_schulz
    try:
        module.newton_schulz = lambda *arguments: calls.append(arguments[0].shape) or whole(*arguments)  # type: ignore
        for stage in STAGES:
            calls.clear()
            model, optimizer = make_sharded("muon", stage)
            train(model, optimizer, 0, 1)
            count = torch.tensor(len(calls))
            assert 0 < len(calls) < 12
            dist.all_reduce(count)
            assert count == 12, "matrices of the blocks"
    finally:
        module.newton_schulz = whole


@each_optimizer
@on_ranks(2)
def test_a_gradient_that_one_rank_has_dropped_is_an_error_on_all(name: str) -> None:
    model, optimizer = make_sharded(name, 1)
    loss_of(model, make_batches()[0].chunk(2)[dist.get_rank()]).backward()
    if dist.get_rank() == 1:
        model.blocks[0].up.weight.grad = None
    with raises(RuntimeError, "rank 1 steps with gradients of other parameters", "nothing was stepped"):
        optimizer.step()


@on_ranks(2)
def test_gradient_scaler_and_frozen_parameters() -> None:
    """A parameter that is unfrozen later; a scale that goes into the step."""
    model = make_model(torch.float64)
    model.blocks[0].requires_grad_(False)
    model = zeropg.fully_shard(model, stage=2)
    optimizer = zeropg.shard_optimizer(muon(model), model)
    scaler = zeropg.GradScaler(init_scale=2.0**10)
    before = weights_of(model)
    for batch in make_batches()[:2]:
        scaler.scale(loss_of(model, batch.chunk(2)[dist.get_rank()])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.blocks[0].requires_grad_(True)
    assert all(not torch.equal(value, before[key]) for key, value in weights_of(model).items())
