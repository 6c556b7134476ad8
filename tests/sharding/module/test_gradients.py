"""What users see of gradients: `.grad`, hooks, accumulation, and paths that differ between ranks."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropg
from tests.sharding.fuse import Fuse
from tests.sharding.ranks import STAGES, close, equal, on_ranks, raises
from tests.small_gpt import SmallGPT, loss_of, make_batches, make_model

DOUBLE = torch.float64


def sharded(stage: int, **options: Any) -> SmallGPT:
    return zeropg.fully_shard(make_model(DOUBLE), stage=stage, **options)


def my_part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def plain_gradients(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    model = make_model(DOUBLE)
    loss_of(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    with zeropg.full_gradients(model):
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    found = whole_gradients(model)
    assert found.keys() == wanted.keys()
    wrong = [name for name in wanted if not close(found[name], wanted[name])]
    assert not wrong, wrong


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_grad_after_backward(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    wanted = plain_gradients(batch)
    loss_of(model, my_part(batch)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        if stage < 2:
            assert close(parameter.grad, wanted[name]), name
            continue
        for read in (lambda g: g.norm(), repr, lambda g: g.mul_(2), lambda g: g.clone(), lambda g: g.numpy()):
            with raises(RuntimeError, f"the gradient of '{name}' is sharded", "clip_grad_norm_", "full_gradients"):
                read(parameter.grad)
    assert_gradients(model, wanted)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_torchs_own_clipping_raises_on_sharded_gradients(stage: int) -> None:
    model = sharded(stage)
    loss_of(model, my_part(make_batches(1)[0])).backward()
    for foreach in (None, False, True):
        with raises(RuntimeError, "is sharded", "zeropg.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    with raises(RuntimeError, "is sharded"):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_add_up_until_they_are_dropped(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    wanted = plain_gradients(batch)
    for times in (1, 2, 3):
        loss_of(model, my_part(batch)).backward()
        assert_gradients(model, {name: times * gradient for name, gradient in wanted.items()})
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert whole_gradients(model) == {}
    assert zeropg.clip_grad_norm_(model, 1.0) == 0
    loss_of(model, my_part(batch)).backward()
    model.zero_grad(set_to_none=False)
    assert_gradients(model, {name: torch.zeros_like(gradient) for name, gradient in wanted.items()})
    loss_of(model, my_part(batch)).backward()
    assert_gradients(model, wanted)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_none_drops_one_parameters_gradient(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    wanted = plain_gradients(batch)
    loss_of(model, my_part(batch)).backward()
    model.blocks[1].up.weight.grad = None
    kept = {name: gradient for name, gradient in wanted.items() if name != "blocks.1.up.weight"}
    assert_gradients(model, kept)
    norm = torch.stack([gradient.norm() for gradient in kept.values()]).norm()
    assert close(zeropg.clip_grad_norm_(model, 1e9), norm)
    before = zeropg.full_state_dict(model, rank0_only=False)
    optimizer.step()
    after = zeropg.full_state_dict(model, rank0_only=False)
    assert equal(before["blocks.1.up.weight"], after["blocks.1.up.weight"])
    assert not equal(before["blocks.1.up.bias"], after["blocks.1.up.bias"])
    wanted = {name: g.clone() for name, g in whole_gradients(model).items()}
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    loss_of(model, my_part(batch)).backward()
    once = plain_gradients(batch)
    assert_gradients(model, {name: once[name] + wanted.get(name, 0) for name in once})


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_user_hooks_see_the_local_gradient(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    local = plain_gradients(my_part(batch))
    seen: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        seen[name] = []
        parameter.register_hook(lambda gradient, name=name: seen[name].append(gradient.clone()))
    for times in (1, 2):  # a second backward shows its own gradient, not the sum with the average before
        loss_of(model, my_part(batch)).backward()
        for name, gradients in seen.items():
            assert len(gradients) == times
            assert all(close(gradient, local[name]) for gradient in gradients), name


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_hooks_after_accumulation_see_the_reduced_gradient(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    wanted = plain_gradients(batch)
    seen: dict[str, int] = {}

    def look(name: str, parameter: torch.Tensor) -> None:
        seen[name] = seen.get(name, 0) + 1
        if stage < 2:
            assert close(parameter.grad, seen[name] * wanted[name]), name
        else:
            with raises(RuntimeError, "is sharded"):
                parameter.grad.clone()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(look, name))
    for times in (1, 2):
        with zeropg.no_sync(model):
            loss_of(model, my_part(batch) * 0).backward()
        model.zero_grad()
        for _ in range(times - 1):
            loss_of(model, my_part(batch)).backward()
            seen = {}
            model.zero_grad()
        loss_of(model, my_part(batch)).backward()
        assert seen == dict.fromkeys(wanted, 1), "once per backward that reduces"
        seen = {}
        model.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_a_hook_after_accumulation_raises_comes_out_of_backward(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    handle = model.norm.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    for _ in range(2):
        with raises(ZeroDivisionError):
            loss_of(model, my_part(batch)).backward()
        assert_gradients(model, plain_gradients(batch))
        model.zero_grad()
    handle.remove()
    loss_of(model, my_part(batch)).backward()
    assert_gradients(model, plain_gradients(batch))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_hook_that_changes_the_gradient_is_obeyed(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    model.norm.weight.register_hook(lambda gradient: gradient * 3)
    loss_of(model, my_part(batch)).backward()
    wanted = plain_gradients(batch)
    wanted["norm.weight"] *= 3
    assert_gradients(model, wanted)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_gradient_that_the_user_puts_there_is_used(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    mine = torch.full_like(plain_gradients(batch)["norm.weight"], 2.0)
    model.norm.weight.grad = mine.clone()  # before any backward
    assert close(zeropg.clip_grad_norm_(model, 1e9), mine.norm())
    loss_of(model, my_part(batch)).backward()
    wanted = plain_gradients(batch)
    assert_gradients(model, wanted | {"norm.weight": wanted["norm.weight"] + mine})
    model.norm.weight.grad = mine.clone()  # in place of the reduced one
    assert_gradients(model, wanted | {"norm.weight": mine})
    loss_of(model, my_part(batch)).backward()
    assert_gradients(model, {n: 2 * g for n, g in wanted.items()} | {"norm.weight": wanted["norm.weight"] + mine})


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_gradient_of_what_was_frozen_is_refused(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    zeropg.fully_shard(model, stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for parameter in model.parameters():  # as an evolution strategy does, which needs no graph
        parameter.grad = torch.ones(parameter.shape)
    with raises(RuntimeError, "step: 0.weight has a gradient, and was frozen when fully_shard", "requires_grad=True"):
        optimizer.step()
    before = zeropg.full_state_dict(model, rank0_only=False)
    model[0].zero_grad()
    optimizer.step()
    after = zeropg.full_state_dict(model, rank0_only=False)
    assert [name for name in before if not torch.equal(after[name], before[name])] == ["1.weight", "1.bias"]


class Branches(nn.Module):
    """Which layers run is decided by the caller."""

    def __init__(self, width: int = 5, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, path: list[int]) -> torch.Tensor:
        for index in path:
            x = torch.tanh(self.layers[index](x))
        return (x * self.scale).sum()


def make_branches() -> Branches:
    torch.manual_seed(3)
    return Branches().double()


def branch_gradients(paths: list[list[int]], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The average over ranks that take `paths`."""
    model = make_branches()
    (sum(model(data[rank], path) for rank, path in enumerate(paths)) / len(paths)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


PATHS = {
    "unused on all ranks": [[0, 1, 3], [0, 1, 3]],
    "unused on one rank": [[0, 1, 2, 3], [0, 3]],
    "another order on each rank": [[0, 1, 2, 3], [3, 1, 0, 2]],
    "disjoint": [[0, 1], [2, 3]],
    "called twice": [[0, 1, 0, 1], [2, 2, 2, 3]],
    "nothing but the root on one rank": [[0, 1, 2, 3], []],
}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_ranks_may_take_different_paths(stage: int) -> None:
    torch.manual_seed(5)
    data = torch.randn(2, 5, dtype=DOUBLE)
    model = zeropg.fully_shard(make_branches(), stage=stage)
    for what, paths in PATHS.items():
        model(data[dist.get_rank()], paths[dist.get_rank()]).backward()
        wanted = branch_gradients(paths, data)
        found = whole_gradients(model)
        assert found.keys() == wanted.keys(), what
        assert all(close(found[name], wanted[name]) for name in wanted), what
        model.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_parameter_without_gradient_is_not_stepped(stage: int) -> None:
    data = torch.ones(5, dtype=DOUBLE)
    model = zeropg.fully_shard(make_branches(), stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    start = make_branches().state_dict()
    for path in ([0, 1], [0, 1]):
        model(data, path).backward()
        assert model.idle.grad is None and model.layers[2].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    end = zeropg.full_state_dict(model, rank0_only=False)
    for name in ("idle", "layers.2.weight", "layers.3.bias"):
        assert equal(end[name], start[name]), name  # not even decayed
    assert not equal(end["scale"], start["scale"])


class Checkpointed(SmallGPT):
    """With activation checkpointing around each block."""

    use_reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.place(self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_activation_checkpointing(stage: int) -> None:
    batch = make_batches(1)[0]
    wanted = plain_gradients(batch)
    for reentrant in (False, True):
        model = make_model(DOUBLE)
        model.__class__ = type("Checkpointed", (Checkpointed,), {"use_reentrant": reentrant})
        zeropg.fully_shard(model, stage=stage)
        for _ in range(2):
            loss_of(model, my_part(batch)).backward()
            assert_gradients(model, wanted)
            model.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_several_forwards_before_their_backwards(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    wanted = plain_gradients(batch)
    first, second = (loss_of(model, part) for part in my_part(batch).chunk(2))
    with torch.no_grad():
        loss_of(model, batch)  # an evaluation in between
    (second / 2).backward()
    (first / 2).backward()
    assert_gradients(model, wanted)
    model.zero_grad()
    ((loss_of(model, my_part(batch)) + loss_of(model, my_part(batch))) / 2).backward()
    assert_gradients(model, wanted)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_forward_without_backward_does_not_go_stale(stage: int) -> None:
    batch = make_batches(1)[0]
    for whole_after_forward in (False, True):
        model = sharded(stage, reshard_after_forward=not whole_after_forward)
        optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loss_of(model, my_part(batch)).backward()
        loss_of(model, my_part(batch))
        optimizer.step()
        plain = make_model(DOUBLE)
        plain.load_state_dict(zeropg.full_state_dict(model, rank0_only=False))
        assert equal(loss_of(model, batch), loss_of(plain, batch))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_no_sync_sums_up_to_the_big_batch(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    wanted = plain_gradients(batch)
    *early, last = my_part(batch).chunk(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for repetition in range(2):
            with zeropg.no_sync(model):
                for part in early:
                    (loss_of(model, part) / 3).backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            with raises(RuntimeError, "no_sync", "have not been reduced"):
                optimizer.step()
            with raises(RuntimeError, "] clip_grad_norm_: gradients", "no_sync", "have not been reduced"):
                zeropg.clip_grad_norm_(model, 1.0)
            (loss_of(model, last) / 3).backward()
            assert_gradients(model, {name: (repetition + 1) * gradient for name, gradient in wanted.items()})
    said = [str(warning.message) for warning in caught if "whole gradients" in str(warning.message)]
    assert len(said) == (1 if stage >= 2 and dist.get_rank() == 0 else 0), said
    model.zero_grad()
    with zeropg.no_sync(model):
        loss_of(model, early[0]).backward()
    model.zero_grad()  # drops what no_sync collected, so that a step has nothing to do
    before = zeropg.full_state_dict(model, rank0_only=False)
    optimizer.step()
    after = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(before[name], after[name]) for name in before)


class Fused(SmallGPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.place(self.positions[: tokens.shape[1]])
        for index, block in enumerate(self.blocks):
            x = Fuse.apply(block(x)) if index == 1 else block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_backward_that_raised_leaves_no_trace(stage: int) -> None:
    batch = make_batches(1)[0]
    model = make_model(DOUBLE)
    model.__class__ = Fused
    zeropg.fully_shard(model, stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    wanted = plain_gradients(batch)
    for accumulated in (False, True):
        if accumulated:
            loss_of(model, my_part(batch)).backward()
        Fuse.blown = True
        with raises(ArithmeticError, "fuse"):
            loss_of(model, my_part(batch)).backward()
        Fuse.blown = False
        if accumulated:
            for refused in (optimizer.step, lambda: zeropg.clip_grad_norm_(model, 1.0), lambda: whole_gradients(model)):
                with raises(RuntimeError, "an earlier backward raised", "zero_grad()"):
                    refused()
            optimizer.zero_grad()
        optimizer.step()  # nothing to do: the gradients are incomplete
        assert zeropg.clip_grad_norm_(model, 1.0) == 0
        with zeropg.full_parameters(model):
            assert equal(model.norm.weight.detach(), torch.ones(36, dtype=DOUBLE))
        loss_of(model, my_part(batch)).backward()
        assert_gradients(model, wanted)
        model.zero_grad()


def check_the_backward_after_one_that_raised(stage: int) -> None:
    """With no forward between them."""
    batch = make_batches(1)[0]
    first, second, third = my_part(batch).chunk(3)
    wanted = [plain_gradients(torch.cat([part.chunk(3)[i] for part in batch.chunk(2)])) for i in range(3)]
    model = make_model(DOUBLE)
    model.__class__ = Fused
    zeropg.fully_shard(model, stage=stage)
    loss_of(model, first).backward()
    refused, *losses = [loss_of(model, part) for part in (first, first, second, third)]
    Fuse.blown = True
    with raises(ArithmeticError, "fuse"):
        losses[0].backward()
    Fuse.blown = False
    with raises(RuntimeError, "backward", "an earlier backward raised", "zero_grad()"):
        refused.backward()
    model.zero_grad()
    losses[1].backward()
    assert_gradients(model, wanted[1])
    losses[2].backward()
    assert_gradients(model, {name: wanted[1][name] + wanted[2][name] for name in wanted[1]})


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_the_backward_after_one_that_raised(stage: int) -> None:
    check_the_backward_after_one_that_raised(stage)


@on_ranks(2, backend="gloo")
def test_the_backward_after_one_that_raised_where_units_are_gathered() -> None:
    check_the_backward_after_one_that_raised(stage=3)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_forward_that_raised_leaves_no_trace(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    handle = model.blocks[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with raises(ZeroDivisionError):
        loss_of(model, my_part(batch))
    handle.remove()
    loss_of(model, my_part(batch)).backward()
    assert_gradients(model, plain_gradients(batch))
    optimizer.step()
    plain = make_model(DOUBLE)
    plain.load_state_dict(zeropg.full_state_dict(model, rank0_only=False))
    assert equal(loss_of(model, batch), loss_of(plain, batch))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_autograd_grad_leaves_the_parameters_gradients_alone(stage: int) -> None:
    model = zeropg.fully_shard(make_branches(), stage=stage)
    x = torch.ones(5, dtype=DOUBLE, requires_grad=True)
    (found,) = torch.autograd.grad(model(x, [0, 1, 2, 3]), x)
    y = torch.ones(5, dtype=DOUBLE, requires_grad=True)
    (wanted,) = torch.autograd.grad(make_branches()(y, [0, 1, 2, 3]), y)
    assert close(found, wanted)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_gradients_hide_again(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    loss_of(model, my_part(batch)).backward()
    with raises(KeyError, "inside"), zeropg.full_gradients(model):
        assert close(model.norm.weight.grad, plain_gradients(batch)["norm.weight"])
        raise KeyError("inside")
    if stage >= 2:
        with raises(RuntimeError, "is sharded"):
            model.norm.weight.grad.clone()
    loss_of(model, my_part(batch)).backward()
    assert_gradients(model, {name: 2 * gradient for name, gradient in plain_gradients(batch).items()})


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_backward_inside_full_gradients_is_refused(stage: int) -> None:
    batch = make_batches(1)[0]
    wanted = plain_gradients(batch)
    model = sharded(stage)
    loss_of(model, my_part(batch)).backward()
    with zeropg.full_gradients(model):
        for inputs in (None, [model.norm.weight]):
            with raises(RuntimeError, f"[zeropg rank {dist.get_rank()}/2] backward", "inside full_gradients", "clone"):
                loss_of(model, my_part(batch)).backward(inputs=inputs)
        with torch.no_grad():
            assert close(loss_of(model, batch), loss_of(make_model(DOUBLE), batch))
        later = loss_of(model, my_part(batch))
        assert all(close(p.grad, wanted[name]) for name, p in model.named_parameters())
    assert_gradients(model, wanted)
    later.backward()
    assert_gradients(model, {name: 2 * gradient for name, gradient in wanted.items()})


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_gradients_inside_a_backward_are_refused_and_harmless(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)

    def show(_: torch.Tensor) -> None:
        with raises(RuntimeError, "full_gradients", "inside a backward"), zeropg.full_gradients(model):
            raise AssertionError("not reached")

    model.blocks[1].up.weight.register_hook(show)
    for times in (1, 2):
        loss_of(model, my_part(batch)).backward()
        assert_gradients(model, {name: times * gradient for name, gradient in plain_gradients(batch).items()})


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_autograd_grad_inside_full_gradients(stage: int) -> None:
    model, plain = zeropg.fully_shard(make_branches(), stage=stage), make_branches()
    x = torch.ones(5, dtype=DOUBLE, requires_grad=True)
    path = [0, 1, 2, 3]
    for each in (model, plain):
        each(x.detach(), path).backward()
    with zeropg.full_gradients(model):
        assert close(*(torch.autograd.grad(each(x, path), x)[0] for each in (model, plain)))
        assert close(*(torch.autograd.grad(each(x, path), each.scale)[0] for each in (model, plain)))
        for one in (model, plain):
            one(x, path).backward(inputs=[x])
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert all(close(gradient, plain.get_parameter(name).grad) for name, gradient in found.items())
    assert_gradients(model, found)


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_a_gradient_put_there_inside_full_gradients_is_used_where_gradients_are_replicated(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    loss_of(model, my_part(batch)).backward()
    with zeropg.full_gradients(model):
        loss_of(model, my_part(batch)).backward()  # nothing is hidden, so nothing is in the way
        model.norm.weight.grad = torch.full_like(model.norm.weight, 3.0)
    wanted = {name: 2 * gradient for name, gradient in plain_gradients(batch).items()}
    assert_gradients(model, wanted | {"norm.weight": torch.full_like(wanted["norm.weight"], 3.0)})


@on_ranks(2, backend="gloo")
def test_every_stage_over_gloo() -> None:
    batch = make_batches(1)[0]
    for stage in STAGES:
        model = sharded(stage)
        loss_of(model, my_part(batch)).backward()
        assert_gradients(model, plain_gradients(batch))
        model = zeropg.fully_shard(make_model(), stage=stage, param_dtype=torch.bfloat16)
        loss_of(model, my_part(batch)).backward()
        assert len(whole_gradients(model)) == len(plain_gradients(batch))


class Slow(torch.autograd.Function):
    """Gives the reduction of the block behind it time, as larger blocks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.05)
        return gradient


@on_ranks(2, backend=["zeropg", "gloo"])
def test_buckets_are_used_again_while_a_backward_runs() -> None:
    blocks = [nn.Linear(64, 64) for _ in range(8)]
    block_bytes = 4 * 64 * 65
    for stage in (2, 3):
        model = zeropg.fully_shard(nn.Sequential(*blocks), stage=stage, units=blocks)
        x = torch.ones(2, 64)
        for block in model:
            x = Slow.apply(block(x))
        x.sum().backward()
        assert model._zeropg.memory_report()["buckets"] <= 4 * block_bytes
        blocks = [nn.Linear(64, 64) for _ in range(8)]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_write_to_what_was_put_into_grad_is_an_error_where_it_is_lost(stage: int) -> None:
    batch = make_batches(1)[0]
    model = sharded(stage)
    buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def put() -> None:
        for name, parameter in model.named_parameters():
            parameter.grad = buffers[name]

    def backward() -> None:
        loss_of(model, my_part(batch)).backward()

    put()
    for buffer in buffers.values():
        buffer.zero_()
    backward()
    assert_gradients(model, plain_gradients(batch))
    for buffer in buffers.values():
        buffer.zero_()  # as if it still were .grad
    with raises(RuntimeError, "the tensor that the program put into .grad of '", "was written to after"):
        backward()
    put()
    backward()
    assert_gradients(model, plain_gradients(batch))
    next(iter(buffers.values())).add_(1)
    model.zero_grad()  # lets go of it
    backward()
    assert_gradients(model, plain_gradients(batch))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3, backend="gloo")
def test_averages_in_fp16_do_not_overflow_over_gloo(stage: int) -> None:
    for ranks in ([0, 1], [0, 1, 2]):
        group = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            continue
        linear = nn.Linear(1, 1, bias=False)
        model = zeropg.fully_shard(linear, stage=stage, reduce_dtype=torch.float16, process_group=group)
        (model(torch.ones(1, 1)) * 40_000).sum().backward()
        assert abs(whole_gradients(model)["weight"].item() - 40_000) <= 32
