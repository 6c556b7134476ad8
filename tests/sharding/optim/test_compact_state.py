"""State in 16 and 8 bits over sharded models: the same bits in every stage, at every cut, and as the class alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.optim.fake_core import ranks_of, shard
from tests.sharding.ranks import STAGES, equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model
from zeropg.optim import Adam, AdamW

BITS = (16, 8)
compact = pytest.mark.parametrize("bits", BITS)
OPTIONS: dict[str, Any] = {"lr": 4e-3, "betas": (0.9, 0.95)}


def groups_of(model: nn.Module, bits: int) -> list[dict[str, Any]]:
    """Matrices in few bits, the rest in 32."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2], "state_bits": 32}]


def step(model: nn.Module, optimizer: Any, number: int, *, alone: bool = False) -> float:
    batch = make_batches()[number]
    loss = loss_of(model, batch if alone else batch.chunk(dist.get_world_size())[dist.get_rank()])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return zeropg.full_state_dict(model, rank0_only=False)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)


@compact
@pytest.mark.parametrize("mixed", [False, True])
@on_ranks(1)
def test_one_rank_has_the_bits_of_the_class_alone(bits: int, mixed: bool) -> None:
    plain = make_model(torch.float32)
    reference = AdamW(groups_of(plain, bits) if mixed else plain.parameters(), state_bits=bits, **OPTIONS)
    expected = [step(plain, reference, number, alone=True) for number in range(4)]
    for stage in STAGES:
        model = zeropg.fully_shard(make_model(torch.float32), stage=stage)
        groups = groups_of(model, bits) if mixed else model.parameters()
        optimizer = zeropg.shard_optimizer(AdamW(groups, state_bits=bits, **OPTIONS), model)
        assert [step(model, optimizer, number) for number in range(4)] == expected
        assert same(whole(model), dict(plain.state_dict()))
        full = zeropg.full_optimizer_state_dict(optimizer)["state"]
        own = reference.state_dict()["state"]
        for index, (name, _) in enumerate(plain.named_parameters()):
            position = [id(p) for group in reference.param_groups for p in group["params"]].index(
                id(dict(plain.named_parameters())[name])
            )
            assert same(full[name], own[position]), (index, name)


@compact
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stages_have_the_same_bits_at_every_world_size(rank_pool: Any, world_size: int, bits: int) -> None:
    for losses, trained in rank_pool(world_size).run(train_in_every_stage, bits, timeout=120):
        assert all(each == losses[0] for each in losses)
        assert all(same(each, trained[0]) for each in trained)


def train_in_every_stage(bits: int) -> tuple[list[list[float]], list[dict[str, torch.Tensor]]]:
    torch.set_num_threads(1)
    losses, trained = [], []
    for stage in STAGES:
        model = zeropg.fully_shard(make_model(torch.float32), stage=stage, param_dtype=torch.bfloat16)
        optimizer = zeropg.shard_optimizer(AdamW(groups_of(model, bits), state_bits=bits, **OPTIONS), model)
        losses.append([step(model, optimizer, number) for number in range(3)])
        trained.append(whole(model))
    return losses, trained


@compact
@on_ranks(2)
def test_state_that_a_class_has_begun_goes_on_in_shards_and_back(bits: int) -> None:
    plain = make_model(torch.float32)
    begun = Adam(plain.parameters(), state_bits=bits, **OPTIONS)
    for number in range(2):
        step(plain, begun, number, alone=True)
    saved = copy.deepcopy(begun.state_dict())
    for stage in STAGES:
        model = zeropg.fully_shard(copy.deepcopy(plain), stage=stage)
        other = Adam(model.parameters(), state_bits=bits, **OPTIONS)
        other.load_state_dict(saved)
        optimizer = zeropg.shard_optimizer(other, model)
        full = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
        for (name, _), entries in zip(plain.named_parameters(), saved["state"].values(), strict=True):
            assert same(full[name], entries), name
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
        assert all(same(full[name], again[name]) for name in full)
        optimizer.load_state_dict(saved)
        step(model, optimizer, 2)


@on_ranks(2)
def test_a_checkpoint_of_any_bits_loads_into_any_others(tmp_path: Path) -> None:
    for bits in (32, *BITS):
        model = zeropg.fully_shard(make_model(torch.float32), stage=2)
        optimizer = zeropg.shard_optimizer(AdamW(model.parameters(), state_bits=bits, **OPTIONS), model)
        step(model, optimizer, 0)
        zeropg.save_checkpoint(tmp_path / str(bits), model, optimizer)
        saved = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
        for others in (32, *BITS):
            other_model = zeropg.fully_shard(make_model(torch.float32), stage=3)
            original = AdamW(other_model.parameters(), lr=1.0, state_bits=others)
            other = zeropg.shard_optimizer(original, other_model)
            zeropg.load_checkpoint(tmp_path / str(bits), other_model, other)
            assert (other.param_groups[0]["state_bits"], other.param_groups[0]["lr"]) == (others, 4e-3)
            loaded = zeropg.full_optimizer_state_dict(other, rank0_only=False)["state"]
            for name, entries in saved.items():
                for key in ("exp_avg", "exp_avg_sq"):
                    if others >= bits:
                        assert loaded[name][key].float().equal(entries[key].float())
                    else:
                        step_size = {16: 2**-8, 8: 2**-3}[others]
                        torch.testing.assert_close(
                            loaded[name][key].float(), entries[key].float(), rtol=step_size, atol=1e-6
                        )
            step(other_model, other, 1)


@compact
@on_ranks(2)
def test_files_shrink_with_the_bits(tmp_path: Path, bits: int) -> None:
    model = zeropg.fully_shard(make_model(torch.float32), stage=1, offload_optimizer=tmp_path)
    optimizer = zeropg.shard_optimizer(AdamW(model.parameters(), state_bits=bits), model)
    numel = sum(flat.master_numel for flat in model._zeropg.flat_groups)  # type: ignore[attr-defined, union-attr]
    reserved = model._zeropg.optimizer_offload.reserved_bytes  # type: ignore[attr-defined, union-attr]
    vectors = 2 * len(model._zeropg.flat_groups)  # type: ignore[attr-defined, union-attr, arg-type]
    planned = {16: 4.0, 8: 2 + 2 / 32}[bits] * numel
    assert planned <= reserved < planned + vectors * 4096, (planned, reserved, vectors)
    del optimizer


@compact
@on_ranks(2)
def test_a_step_with_an_infinite_gradient_is_left_out(bits: int) -> None:
    model = zeropg.fully_shard(make_model(torch.float32), stage=3)
    optimizer = zeropg.shard_optimizer(AdamW(model.parameters(), state_bits=bits, **OPTIONS), model)
    scaler = zeropg.GradScaler(init_scale=2.0**10)
    before: list[Any] = []
    for number in range(4):
        loss = loss_of(model, make_batches()[number].chunk(2)[dist.get_rank()])
        if number == 2:
            before = [whole(model), zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]]
            loss = loss * (torch.inf if dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number == 2:
            after = [whole(model), zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]]
            assert same(after[0], before[0])
            assert all(same(after[1][name], before[1][name]) for name in before[1])
    assert all(value.isfinite().all() for value in whole(model).values())


@compact
@on_ranks(2)
def test_ignored_parameters_keep_few_bits_too(tmp_path: Path, bits: int) -> None:
    def set_up(stage: int) -> tuple[nn.Module, Any]:
        model = make_model(torch.float32)
        ignored = [next(model.parameters())]
        zeropg.fully_shard(model, stage=stage, ignored_params=ignored)
        return model, zeropg.shard_optimizer(AdamW(model.parameters(), state_bits=bits, **OPTIONS), model)

    model, optimizer = set_up(2)
    gradients = torch.Generator().manual_seed(1)
    ignored = next(model.parameters())
    for number in range(2):
        ignored.grad = torch.randn(ignored.shape, generator=gradients)
        step(model, optimizer, number)
    assert optimizer.state[ignored]["exp_avg"].dtype == (torch.uint8 if bits == 8 else torch.bfloat16)
    zeropg.save_checkpoint(tmp_path, model, optimizer)
    saved = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    other_model, other = set_up(3)
    zeropg.load_checkpoint(tmp_path, other_model, other)
    loaded = zeropg.full_optimizer_state_dict(other, rank0_only=False)["state"]
    assert all(same(loaded[name], saved[name]) for name in saved)
    optimizer.load_state_dict(optimizer.state_dict())


@on_ranks(2)
def test_bits_that_change_half_way_are_said_and_convert_through_a_state_dict() -> None:
    model = zeropg.fully_shard(make_model(torch.float32), stage=3)
    optimizer = zeropg.shard_optimizer(AdamW(model.parameters(), **OPTIONS), model)
    optimizer.param_groups[0]["state_bits"] = 8  # before the first step
    step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {value.dtype for value in saved["state"][0].values() if value.dim()} <= {torch.bfloat16}
    optimizer.param_groups[0]["state_bits"] = 16
    with raises(RuntimeError, "state_bits of the param group of", "pass state_dict() to load_state_dict"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    step(model, optimizer, 1)
    dtypes = {state["exp_avg"].dtype for state in optimizer.state.values() if state}
    assert dtypes <= {torch.bfloat16}


def test_a_state_that_is_edited_counts() -> None:
    (model,) = ranks_of(nn.Linear(40, 3), 1)
    optimizer: Any = zeropg.shard_optimizer(AdamW(model.parameters(), state_bits=8, weight_decay=0.0), model)
    weight = model.weight
    for _ in range(2):
        weight.grad, model.bias.grad = torch.ones(3, 40), torch.ones(3)
        optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.zeros(120)
    before = weight.detach().clone()
    optimizer.param_groups[0]["betas"] = (1 - 1e-7, 0.999)
    weight.grad, model.bias.grad = torch.ones(3, 40), None
    optimizer.step()
    first = dict(zip(("exp_avg", "exp_avg_sq"), (0.0, 3e-3), strict=True))
    for key, expected in first.items():
        values = optimizer.state_dict()["state"][0][key].float()
        torch.testing.assert_close(values, torch.full((120,), expected), rtol=0.2, atol=1e-6)
    assert not weight.equal(before)
    with pytest.raises(ValueError, match=r"exp_avg of weight has shape \[7\], expected \[120\]"):
        optimizer.state[weight]["exp_avg"] = torch.zeros(7)
        optimizer.step()


@compact
def test_float64_masters_are_refused(bits: int) -> None:
    model = shard(nn.Linear(3, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"masters in torch.float64.*use state_bits=32"):
        zeropg.shard_optimizer(AdamW(model.parameters(), state_bits=bits), model)
