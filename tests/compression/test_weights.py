"""`fully_shard(compression=Plan(weights=...))`: updates that travel as encoded differences."""

from __future__ import annotations

import contextlib
import io
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.compression.test_all_reduce import group_on_hosts
from tests.compression.test_sharded import make_sharded, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import LEARNING_RATE, loss_of, make_batches
from zeropg.compression import BlockQuant, OneBit, Plan, RandomK, TopK, TwoBit

WEIGHTS = Plan(weights=BlockQuant(4))
BOTH = Plan(gradients=BlockQuant(4), weights=BlockQuant(4))
DTYPES = (None, torch.bfloat16)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    state = zeropg.full_state_dict(model, rank0_only=False)
    return {name: state[name].clone() for name, _ in model.named_parameters()}


def joined(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


def shown(model: nn.Module) -> torch.Tensor:
    """What forwards compute with."""
    return joined(model.parameters())


def check_same_everywhere(tensor: torch.Tensor) -> None:
    first = tensor.clone()
    dist.broadcast(first, 0)
    assert torch.equal(tensor.view(torch.int32), first.view(torch.int32))


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def distance(model: nn.Module) -> float:
    return (joined(masters(model).values()) - shown(model)).abs().max().item()


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("stage", "hosts"), [(1, "0,0,1"), (2, "0,0,0"), (2, "0,1,0")])
@on_ranks(3)
def test_replicas_are_equal_to_the_bit_and_follow_the_masters(
    stage: int, hosts: str, param_dtype: torch.dtype | None
) -> None:
    group = group_on_hosts(hosts)
    model, optimizer = make_sharded(BOTH, stage, process_group=group, param_dtype=param_dtype)
    for batch in make_batches(6):
        train(model, optimizer, batch[None])
        check_same_everywhere(shown(model))
        assert 0 < distance(model) < LEARNING_RATE
    distances = [distance(model)]
    for _ in range(5):  # steps without gradients
        optimizer.step()
        check_same_everywhere(shown(model))
        distances.append(distance(model))
    rounding = 1e-7 if param_dtype is None else 2**-8
    assert all(after <= before / 7 + rounding for before, after in pairwise(distances)), distances
    assert distances[-1] <= rounding, distances


@pytest.mark.parametrize(("plan", "tolerance"), [(BOTH, 0.08), (Plan(weights=BlockQuant(8)), 0.02)], ids=str)
@on_ranks(2)
def test_learns_as_without_compression(plan: Plan, tolerance: float) -> None:
    batches = make_batches()
    expected = train(*make_sharded(None, 2), batches)
    losses = train(*make_sharded(plan, 2), batches)
    assert losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=tolerance), (losses, expected)


@on_ranks(2)
def test_stages_1_and_2_have_the_same_losses_to_the_bit() -> None:
    batches = make_batches(8)
    assert train(*make_sharded(WEIGHTS, 1), batches) == train(*make_sharded(WEIGHTS, 2), batches)


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@on_ranks(2)
def test_a_step_changes_masters_as_it_does_without_compression(param_dtype: torch.dtype | None) -> None:
    batch = make_batches(1)[0]
    results = []
    for plan in (None, WEIGHTS):
        model, optimizer = make_sharded(plan, 2, param_dtype=param_dtype)
        loss_of(model, batch).backward()
        optimizer.step()
        results.append(masters(model))
    check_equal(*results)


def train_and_save(folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = make_sharded(BOTH, 2)
    train(model, optimizer, make_batches(4))
    assert distance(model) > 0
    zeropg.save_checkpoint(folder, model, optimizer)
    zeropg.save_16bit_weights(model, folder + "-16bit")
    return masters(model)


def load(folder: str, stage: int, param_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    model, optimizer = make_sharded(BOTH, stage, param_dtype=param_dtype)
    train(model, optimizer, make_batches(1))  # what was there before must not show
    zeropg.load_checkpoint(folder, model, optimizer)
    loaded = masters(model)
    rounded = [value.to(param_dtype or torch.float32) for value in loaded.values()]
    assert torch.equal(shown(model), joined(rounded)), "forwards must begin with what was loaded"
    train(model, optimizer, make_batches(1))
    check_same_everywhere(shown(model))
    return loaded


def test_checkpoints_and_exports_hold_the_masters(rank_pool: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = str(tmp_path / "checkpoint")
    saved = rank_pool(2).run(train_and_save, folder)[0]
    for name, value in load_file(f"{folder}-16bit/model.safetensors").items():
        if name in saved:
            assert torch.equal(value, saved[name].bfloat16()), name
    check_equal(rank_pool(3).run(load, folder, 1, None)[0], saved)
    check_equal(rank_pool(2).run(load, folder, 2, torch.bfloat16)[0], saved)


def make_trained(stage: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    model, optimizer = make_sharded(BOTH, stage, **options)
    train(model, optimizer, make_batches(3))
    before = masters(model)
    assert distance(model) > 0
    return model, optimizer, before


NAME = "blocks.0.up.weight"


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@on_ranks(2)
def test_only_the_masters_of_written_elements_change(param_dtype: torch.dtype | None) -> None:
    model, optimizer, before = make_trained(param_dtype=param_dtype)
    weight = dict(model.named_parameters())[NAME]
    for writes in range(2):  # the second finds what the first has left
        row = 3 + 100 * writes
        seen = weight.detach().clone()
        with torch.no_grad():
            weight[row].clamp_(-0.01, 0.01)
        after = masters(model)
        is_written = weight.detach() != seen
        assert is_written[row].any() and not is_written[:row].any() and not is_written[row + 1 :].any()
        expected = {**before, NAME: torch.where(is_written, weight.detach().float(), before[NAME])}
        check_equal(after, expected)
        before = after
    train(model, optimizer, make_batches(1))
    check_same_everywhere(shown(model))


@on_ranks(2)
def test_every_way_to_write_counts_and_leaves_the_rest() -> None:
    model, optimizer, before = make_trained()
    weight = dict(model.named_parameters())[NAME]
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        weight[0, 0] = 7.0
    before[NAME][0, 0] = 7.0
    check_equal(masters(model), before)
    weight.detach().numpy()[1, 1] = 8.0
    before[NAME][1, 1] = 8.0
    check_equal(masters(model), before)
    other = weight.detach().clone()
    other[2, 2] = 9.0
    weight.data = other
    before[NAME][2, 2] = 9.0
    check_equal(masters(model), before)
    for name, shard, start, stop in zeropg.local_shards(model):
        assert torch.equal(shard, before[name].flatten()[start:stop]), name
    train(model, optimizer, make_batches(1))
    check_same_everywhere(shown(model))
    assert weight[0, 0].item() == pytest.approx(7.0, abs=0.1)


@on_ranks(2)
def test_ranks_that_write_differently_are_told_and_stay_equal() -> None:
    model, optimizer, before = make_trained()
    weight = dict(model.named_parameters())[NAME]
    with torch.no_grad():
        weight[0, 0] = float(dist.get_rank())
    with raises(RuntimeError, "different values", NAME):
        optimizer.step()
    check_same_everywhere(shown(model))
    before[NAME][0, 0] = 0.0
    check_equal(masters(model), before)


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@on_ranks(2)
def test_forwards_begin_with_what_was_loaded_or_published(param_dtype: torch.dtype | None) -> None:
    model, optimizer, before = make_trained(param_dtype=param_dtype)
    loaded = {name: value + 0.25 for name, value in before.items()}
    model.load_state_dict(loaded, strict=False)
    check_equal(masters(model), loaded)
    rounded = [value.to(param_dtype or torch.float32) for value in loaded.values()]
    assert torch.equal(shown(model), joined(rounded))
    train(model, optimizer, make_batches(2))
    before = masters(model)
    with zeropg.writable_shards(model) as shards:
        for _, shard, *_ in shards:
            shard.mul_(0.5)
    halved = {name: 0.5 * value for name, value in before.items()}
    check_equal(masters(model), halved)
    assert torch.equal(shown(model), joined([value.to(param_dtype or torch.float32) for value in halved.values()]))


@on_ranks(2)
def test_skipped_steps_and_no_sync_send_nothing() -> None:
    model, optimizer, before = make_trained()
    batch = make_batches(1)[0]
    seen = shown(model)
    scaler = zeropg.GradScaler(init_scale=2.0**10)
    with zeropg.no_sync(model):
        scaler.scale(loss_of(model, batch)).backward()
    loss = loss_of(model, batch)
    scaler.scale(loss * float("inf") if dist.get_rank() == 1 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    check_equal(masters(model), before)
    assert torch.equal(shown(model), seen)


@on_ranks(2)
def test_a_replica_mends_when_its_master_does() -> None:
    model, optimizer, _ = make_trained()
    group = next(group for group in model._zeropg.flat_groups if group.sends_differences)  # type: ignore[union-attr]
    group.master[0] = float("nan")
    optimizer.step()
    assert shown(model).isnan().any()
    group.master[0] = 0.5
    for _ in range(5):
        optimizer.step()
    check_same_everywhere(shown(model))
    assert distance(model) < 1e-6


@on_ranks(2)
def test_a_nan_in_the_padding_reaches_nobody() -> None:
    """Adam without eps divides zero by zero there."""
    model = nn.Linear(1025, 3, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), eps=0.0)
    zeropg.fully_shard(model, stage=2, compression=WEIGHTS)
    optimizer = zeropg.shard_optimizer(optimizer, model)
    for _ in range(2):
        model(torch.randn(4, 1025)).square().mean().backward()
        optimizer.step()
    assert shown(model).isfinite().all()


@on_ranks(2)
def test_an_unfrozen_parameter_gets_masters_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeropg.fully_shard(model, stage=2, compression=WEIGHTS)
    optimizer = zeropg.shard_optimizer(optimizer, model)
    model[0].weight.requires_grad_(True)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    check_same_everywhere(shown(model))
    assert 0 < distance(model) < 1e-3
    assert all(group.sends_differences == group.is_encoded for group in model._zeropg.flat_groups)  # type: ignore[union-attr]


@on_ranks(2)
def test_the_summary_and_the_memory_report_say_what_masters_take() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, _ = make_sharded(BOTH, 2)
    if dist.get_rank() == 0:
        assert (
            "updates as differences in block_quant(bits=4, block=256), for which masters apart from them take"
            in said.getvalue()
        )
    groups = model._zeropg.flat_groups  # type: ignore[union-attr]
    apart = sum(4 * group.shard_numel for group in groups if group.is_encoded)
    assert model._zeropg.memory_report()["masters"] == apart > 0  # type: ignore[union-attr]


@on_ranks(2)
def test_what_cannot_serve_is_refused_before_anything_is_sharded() -> None:
    model = nn.Linear(64, 64)
    for codec in (TopK(0.01), RandomK(0.01), OneBit(), TwoBit()):
        with raises(ValueError, "Plan: weights is", "too coarse", "BlockQuant(4)"):
            Plan(weights=codec)
    with raises(ValueError, "stage 0", "no weights travel"):
        zeropg.fully_shard(model, stage=0, compression=WEIGHTS)
    with raises(ValueError, "float64"):
        zeropg.fully_shard(nn.Linear(64, 64).double(), stage=2, compression=WEIGHTS)
    with raises(ValueError, "needs a group of zeropg", "gloo"):
        zeropg.fully_shard(model, stage=2, compression=WEIGHTS, process_group=dist.new_group(backend="gloo"))
    with raises(ValueError, "offload_optimizer", "weights="):
        zeropg.fully_shard(model, stage=2, compression=WEIGHTS, offload_optimizer="/tmp")
    plan = Plan(weights=BlockQuant(4 if dist.get_rank() == 0 else 8))
    with raises(ValueError, "weights=BlockQuant("):
        zeropg.fully_shard(model, stage=2, compression=plan)
    zeropg.fully_shard(model, stage=2, compression=WEIGHTS)


INT8 = Plan(weights=BlockQuant(8))


class Seen:
    """What the first block computes with, in every forward."""

    def __init__(self, model: nn.Module) -> None:
        self.block = model.blocks[0]  # type: ignore[index, union-attr]
        self.weights: dict[str, torch.Tensor] = {}
        self.block.register_forward_pre_hook(self.look)  # after the unit is whole

    def look(self, *_: Any) -> None:
        self.weights = {f"blocks.0.{name}": value.detach().clone() for name, value in self.block.named_parameters()}


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hosts", ["0,1,2", "0,1,0"])
@on_ranks(3)
def test_gathered_units_compute_with_decoded_weights(hosts: str, param_dtype: torch.dtype | None) -> None:
    group = group_on_hosts(hosts)
    model, optimizer = make_sharded(INT8, 3, process_group=group, param_dtype=param_dtype)
    assert model._zeropg.fetch_name.startswith("gathered")  # type: ignore[union-attr]
    seen = Seen(model)
    for batch in make_batches(3):
        exact = masters(model)
        with zeropg.full_parameters(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, exact[name].to(parameter.dtype)), f"{name} is not whole as it is"
        train(model, optimizer, batch[None])
        check_same_everywhere(joined(seen.weights.values()))
        for name, value in seen.weights.items():
            rounded = exact[name].to(value.dtype)
            assert torch.equal(value, rounded) == (value.dim() == 1), name
            scale = rounded.abs().max().item() / 127
            assert (value - rounded).abs().max() <= 0.51 * scale + 2**-8 * rounded.abs().max(), name


@on_ranks(2)
def test_gathered_stage_3_learns_as_without_compression() -> None:
    group = group_on_hosts("0,1")
    batches = make_batches()
    expected = train(*make_sharded(None, 3, process_group=group), batches)
    plan = Plan(gradients=BlockQuant(4), weights=BlockQuant(8))
    losses = train(*make_sharded(plan, 3, process_group=group), batches)
    assert losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=0.08), (losses, expected)


@on_ranks(2)
def test_writes_to_gathered_weights_change_the_masters_of_what_was_written() -> None:
    group = group_on_hosts("0,1")
    model, optimizer = make_sharded(INT8, 3, process_group=group)
    train(model, optimizer, make_batches(2))
    before = masters(model)
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        dict(model.named_parameters())[NAME][3] = 0.125
    before[NAME][3] = 0.125
    check_equal(masters(model), before)
    handle = model.blocks[0].register_forward_pre_hook(write_one)  # type: ignore[index, union-attr]
    loss_of(model, make_batches(1)[0]).backward()
    handle.remove()
    before[NAME][5, 5] = 0.5
    check_equal(masters(model), before)
    model.load_state_dict({name: value + 1 for name, value in before.items()}, strict=False)
    check_equal(masters(model), {name: value + 1 for name, value in before.items()})


def write_one(block: nn.Module, _: Any) -> None:
    with torch.no_grad():
        block.up.weight[5, 5] = 0.5  # type: ignore[union-attr, operator]


@on_ranks(2)
def test_weights_of_any_shape_and_frozen_ones_travel_encoded() -> None:
    group = group_on_hosts("0,1")
    model = nn.Sequential(nn.Linear(37, 41), nn.Linear(41, 43), nn.Linear(43, 3, bias=False))
    model[0].weight.requires_grad_(False)
    zeropg.fully_shard(model, stage=3, compression=INT8, process_group=group, units=[nn.Linear])
    assert sum(flat.is_encoded for flat in model._zeropg.flat_groups) == 2  # type: ignore[union-attr]
    whole = {}
    model[0].register_forward_pre_hook(lambda module, _: whole.update(weight=module.weight.detach().clone()))
    model(torch.randn(5, 37)).sum().backward()
    exact = masters(model)["0.weight"]
    check_same_everywhere(whole["weight"])
    assert 0 < (whole["weight"] - exact).abs().max() <= 0.51 * exact.abs().max() / 127


@on_ranks(2)
def test_stage_3_inside_a_node_says_that_nothing_travels() -> None:
    batch = make_batches(1)[0]
    results = []
    for plan in (None, INT8):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            model, optimizer = make_sharded(plan, 3)
        if dist.get_rank() == 0:
            assert ("weights as block_quant(bits=8, block=256) changes nothing" in said.getvalue()) == (plan is INT8)
        loss_of(model, batch).backward()
        optimizer.step()
        results.append(masters(model))
    check_equal(*results)


@on_ranks(2)
def test_state_dict_says_once_that_it_has_the_replicas() -> None:
    model, _, before = make_trained()
    with pytest.warns(UserWarning, match="the replicas that the model computes with.*full_state_dict"):
        shown = model.state_dict()
    assert not all(torch.equal(shown[name], value) for name, value in before.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()
        model.load_state_dict(zeropg.full_state_dict(model, rank0_only=False))
        zeropg.fully_shard(nn.Linear(8, 8)).state_dict()
