"""Ranks that are about to step differently, and graphs of weights that are no more: errors, not a torn model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from zeropg.optim.checked_groups import digest_of_options


def _add_group(model: Any, optimizer: Any) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": optimizer.param_groups[0]["lr"]})


def _change_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1.01


def _drop_gradient(model: Any, optimizer: Any) -> None:
    model.norm.bias.grad = None


NUMBERS, GRADIENTS = "param groups of other numbers", "gradients of other parameters"
CHANGES: dict[Callable[[Any, Any], None], str] = {
    _change_rate: NUMBERS,
    _add_group: NUMBERS,
    _drop_gradient: GRADIENTS,
}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=("zeropg", "gloo"))
def test_a_rank_that_steps_differently_is_named_and_nothing_is_stepped(stage: int) -> None:
    batches = make_batches()
    for change, words in CHANGES.items():
        model = zeropg.fully_shard(make_model(), stage=stage)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        loss_of(model, batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = zeropg.full_state_dict(model, rank0_only=False)
        loss_of(model, batches[1]).backward()
        if dist.get_rank() == 1:
            change(model, optimizer)
        with raises(RuntimeError, "step: rank 1 steps with", words, "nothing was stepped"):
            optimizer.step()
        after = zeropg.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(after[key], before[key]) for key in before)
        if dist.get_rank() == 0:
            change(model, optimizer)
        optimizer.step()  # now that both have it


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=("zeropg", "gloo"))
def test_ranks_that_unfreeze_different_parameters_are_told(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3), nn.Linear(3, 4))  # no two units have one size
    model[:2].requires_grad_(False)
    zeropg.fully_shard(model, stage=stage, units=list(model))
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model[dist.get_rank()].requires_grad_(True)
    before = zeropg.full_state_dict(model, rank0_only=False, only=["2.weight"])
    is_told_early = stage == 3 and dist.get_backend() == "gloo"  # before they gather other units in the backward
    told = "unshard: '0.weight', or another parameter of unit '0', requires a gradient on rank 0, and none"
    if not is_told_early:
        told = "backward: '1.weight', or another parameter of unit '1', was unfrozen"
    with raises(RuntimeError, told):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    if is_told_early:
        with torch.no_grad():
            model(torch.ones(2, 4))  # where nothing is trained it does not matter
        with zeropg.full_parameters(model):
            assert model[2].weight.equal(before["2.weight"])
    assert zeropg.full_state_dict(model, rank0_only=False, only=["2.weight"])["2.weight"].equal(before["2.weight"])


def _write_gradients(model: Any, optimizer: Any) -> None:
    with zeropg.full_gradients(model):
        for parameter in model.parameters():
            parameter.grad.add_(0.1 * dist.get_rank())


def _forget_moments(model: Any, optimizer: Any) -> None:
    if dist.get_rank() == 1:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


@pytest.mark.parametrize("decide", [_write_gradients, _forget_moments])
@on_ranks(2, backend=("zeropg", "gloo"))
def test_in_stage_0_ranks_that_drift_apart_are_told(decide: Callable[[Any, Any], None]) -> None:
    model = zeropg.fully_shard(make_model(), stage=0)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for batch in make_batches()[:2]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, make_batches()[0]).backward()
    decide(model, optimizer)
    optimizer.step()
    with raises(RuntimeError, "full_state_dict: the ranks have different masters since an earlier step", "stage 0"):
        zeropg.full_state_dict(model)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_ranks_that_clip_or_scale_differently_are_told(stage: int) -> None:
    rank = dist.get_rank()
    model = zeropg.fully_shard(make_model(), stage=stage)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    scaler = zeropg.GradScaler(init_scale=2.0 ** (4 + rank))
    scaler.scale(loss_of(model, make_batches()[0])).backward()
    with raises(RuntimeError, f"GradScaler: the loss scale is {2.0 ** (4 + rank)} here, and from 16.0 to 32.0"):
        scaler.unscale_(optimizer)
    with raises(ValueError, f"clip_grad_norm_: max_norm is {1 + rank} and", f"but {2 - rank} and", "no gradient was"):
        zeropg.clip_grad_norm_(model, 1.0 + rank)
    for is_same in (False, True):
        zeropg.clip_grad_norm_(model, 1.0, error_if_nonfinite=is_same or rank == 1)
        told = (NUMBERS, "So do the arguments of clip_grad_norm_ count", f"error_if_nonfinite {rank == 1}")
        with nullcontext() if is_same else raises(RuntimeError, *told):
            optimizer.step()


@on_ranks(2)
def test_notes_in_param_groups_and_the_last_digits_of_numbers_may_differ() -> None:
    rank = dist.get_rank()
    model = zeropg.fully_shard(make_model())
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    optimizer.param_groups[0]["loss here"] = float(rank)
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15 * rank
    loss_of(model, make_batches()[0]).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_backward_refuses_weights_that_changed_since_its_forward(stage: int, tmp_path: Path) -> None:
    model = zeropg.fully_shard(make_model(), stage=stage)
    zeropg.save_checkpoint(tmp_path, model)
    loss = loss_of(model, make_batches()[0])
    zeropg.load_checkpoint(tmp_path, model)
    with raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()
    loss_of(model, make_batches()[0]).backward()


@on_ranks(2)
def test_averages_and_parameters_outside_of_a_graph_may_be_written_between_forward_and_backward() -> None:
    model = zeropg.fully_shard(make_model())
    average = zeropg.ema(model, 0.5)
    loss = loss_of(model, make_batches()[0])
    with average.average_parameters():
        pass
    with zeropg.writable_shards(model) as shards:
        for name, tensor, _, _ in shards:
            if name == "norm.bias":  # no backward reads a bias
                tensor.add_(1.0)
    loss.backward()


@on_ranks(2)
def test_backwards_over_a_border_of_averages_are_refused() -> None:
    for stage in (1, 2, 3):
        model = zeropg.fully_shard(make_model(), stage=stage)
        average = zeropg.ema(model, 0.5)
        average.update()
        before, across = (loss_of(model, make_batches()[0]) for _ in range(2))
        with average.average_parameters():
            inside = loss_of(model, make_batches()[0])
            loss_of(model, make_batches()[0]).backward()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                across.backward()
            model.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            inside.backward()
        model.zero_grad()
        before.backward()


class OfItsOwn(torch.optim.SGD):
    zeropg_elementwise = True

    def __init__(self, params: Any, lr: float, seed: int) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["seed"] = seed
        self.defaults["seed"] = seed


@on_ranks(2)
def test_parameters_and_options_of_single_ranks_are_their_own() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(1 + rank)))
    model.forward = lambda x: sum(one(model[0](x)) for one in model[1])  # type: ignore[assignment]
    zeropg.fully_shard(model, ignored_params=model[1].parameters())
    optimizer = zeropg.shard_optimizer(OfItsOwn(model.parameters(), 0.1, seed=rank), model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_digests_of_numbers_that_nearly_agree_have_one_in_common() -> None:
    parameter = nn.Parameter(torch.ones(1))

    def digests(rate: float) -> tuple[int, int]:
        optimizer = torch.optim.AdamW([parameter], lr=rate)
        return digest_of_options(optimizer, optimizer.param_groups, {id(parameter)}, (1.0,))

    for rate in (1e-3 / 512, 0.1, 1.0, 3e-20, 1e-3):
        near = [digests(rate * (1 + step * 2**-52)) for step in (-1, 0, 1)]
        assert all(one[0] == near[0][0] or one[1] == near[0][1] for one in near), rate
    assert not set(digests(1e-3)) & set(digests(1.01e-3)) and min(digests(0.0)) > 0


@on_ranks(2)
def test_loaded_options_are_copies() -> None:
    model = zeropg.fully_shard(nn.Linear(4, 4))
    one, other = (
        zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)), model) for _ in range(2)
    )
    other.load_state_dict(one.state_dict())
    one.param_groups[0]["lr"].fill_(7.0)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.1)


@on_ranks(2)
def test_state_that_is_made_under_inference_mode_is_stepped_as_any_other() -> None:
    batches = make_batches(2)

    def train(mode: type[Any], offload: str | None) -> dict[str, torch.Tensor]:
        model = zeropg.fully_shard(make_model(), stage=3, offload_optimizer=offload)
        with mode():
            optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = optimizer.state_dict()
            with mode():
                optimizer.load_state_dict(saved)
        return zeropg.full_state_dict(model, rank0_only=False)

    for offload in (None, "cpu"):
        expected, found = train(nullcontext, offload), train(torch.inference_mode, offload)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
