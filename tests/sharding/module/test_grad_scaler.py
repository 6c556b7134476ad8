"""Dynamic loss scaling: torch's scaler on one process and zeropg's on ranks take the same decisions."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.sharding.ranks import STAGES, on_ranks, raises

SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
# In which steps a gradient overflows, and on which rank.
OVERFLOWS = {1: 0, 4: 1, 5: 0}
STEPS = 8


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def loss_of(model: nn.Module, step: int, ranks: list[int]) -> torch.Tensor:
    """The mean loss of these ranks' parts of the batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    loss = torch.stack([model(x[rank]).square().mean() for rank in ranks]).mean()
    return loss * (torch.inf if OVERFLOWS.get(step) in ranks else 1.0)


def train(model: nn.Module, optimizer: Any, scaler: Any, how: str, ranks: list[int], clip: Any) -> list[float]:
    scales = []
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, ranks)).backward()
        if how != "plain":
            scaler.unscale_(optimizer)
        if how == "clipped":
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("how", ["plain", "unscaled", "clipped"])
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
@on_ranks(2)
def test_scales_and_parameters_are_those_of_one_process(how: str, optimizer: str) -> None:
    import zeropg

    kind: Any = {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[optimizer]
    plain = make()
    stepper = kind(plain.parameters(), lr=1e-2)
    expected = train(
        plain,
        stepper,
        torch.amp.GradScaler("cpu", **SETTINGS),
        how,
        [0, 1],
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    assert len(set(expected)) == 3, "the scale never moved"
    for stage in STAGES:
        model = zeropg.fully_shard(make(), stage=stage)
        sharded = zeropg.shard_optimizer(kind(model.parameters(), lr=1e-2), model)
        scaler = zeropg.GradScaler(**SETTINGS)
        clip = lambda model: zeropg.clip_grad_norm_(model, 0.1)  # noqa: E731
        assert train(model, sharded, scaler, how, [dist.get_rank()], clip) == expected
        with zeropg.full_parameters(model):
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_two_optimizers_share_a_model() -> None:
    import zeropg

    plain = make()
    model = zeropg.fully_shard(copy.deepcopy(plain), stage=2)
    optimizers = [
        zeropg.shard_optimizer(torch.optim.RMSprop(part.parameters(), lr=1e-2), model) for part in (model[0], model[2])
    ]
    references = [torch.optim.RMSprop(part.parameters(), lr=1e-2) for part in (plain[0], plain[2])]
    for scaler, steppers, trained, ranks in (
        (zeropg.GradScaler(**SETTINGS), optimizers, model, [dist.get_rank()]),
        (torch.amp.GradScaler("cpu", **SETTINGS), references, plain, [0, 1]),
    ):
        scaler.scale(loss_of(trained, 0, ranks)).backward()
        for stepper in steppers:
            scaler.step(stepper)
        scaler.update()
    with zeropg.full_parameters(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_a_scale_that_is_set_between_steps_scales_what_is_pending() -> None:
    import zeropg

    ranks = [dist.get_rank()]
    plan = zeropg.compression.Plan(gradients=zeropg.compression.BlockQuant(4), min_elements=0)
    model = zeropg.fully_shard(make().float(), stage=2, compression=plan)
    optimizers = [zeropg.shard_optimizer(torch.optim.SGD(part.parameters(), lr=1e-2), model) for part in model[::2]]
    scaler = zeropg.GradScaler(init_scale=2.0**10)
    scaler.scale(model(torch.ones(4, 7) + ranks[0]).square().mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    before = [values.clone() for *_, values in model._zeropg.residuals.segments()]
    assert any(values.any() for values in before)
    scaler.update(2.0**7)
    for old, (*_, new) in zip(before, model._zeropg.residuals.segments(), strict=True):
        assert torch.equal(new, old / 8)
    core = weakref.ref(model._zeropg)
    del model, optimizer, optimizers
    gc.collect()
    assert core() is None, "the scaler holds the model"
    scaler.update(2.0**8)


@on_ranks(2)
def test_wrong_calls_are_refused() -> None:
    import zeropg

    model = zeropg.fully_shard(make(), stage=3)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scaler = zeropg.GradScaler()
    with raises(TypeError, "GradScaler.step: got a SGD", "torch.amp.GradScaler"):
        scaler.step(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with raises(RuntimeError, "no step()"):
        scaler.update()
    with raises(TypeError, "got a str"):
        scaler.scale("loss")
    before = scaler.state_dict()
    for is_unscaled in (False, True):
        scaler.scale(loss_of(model, 0, [dist.get_rank()])).backward()
        optimizer.zero_grad()
        if is_unscaled:
            scaler.unscale_(optimizer)
        with raises(RuntimeError, "GradScaler.step: no parameter of the optimizer had a gradient on any rank"):
            scaler.step(optimizer)
        with raises(RuntimeError, "no step()"):
            scaler.update()
    assert scaler.state_dict() == before
    scaler.scale([loss_of(model, 0, [dist.get_rank()])])[0].backward()
    scaler.unscale_(optimizer)
    with raises(RuntimeError, "called twice"):
        scaler.unscale_(optimizer)
    with raises(NotImplementedError, "closures"):
        scaler.step(optimizer, lambda: 0)
    scaler.step(optimizer)
    with raises(RuntimeError, "has stepped already"):
        scaler.step(optimizer)
    with raises(ValueError, "growth_factor 0.5"):
        zeropg.GradScaler(growth_factor=0.5)
    other = zeropg.GradScaler(init_scale=2.0)
    other.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    assert other.get_scale() == 8.0 and other.state_dict() == torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    assert zeropg.GradScaler("cpu", 8.0, growth_interval=7).state_dict() == (
        torch.amp.GradScaler("cpu", 8.0, growth_interval=7).state_dict()
    )
    with raises(TypeError, "device is 8.0, expected a device such as 'cpu'"):
        zeropg.GradScaler(8.0)  # type: ignore[arg-type]
    off = zeropg.GradScaler(enabled=False)
    assert off.state_dict() == {} and off.get_scale() == 1.0 and off.scale(3) == 3 and not off.is_enabled()
    with raises(ValueError, "are missing"):
        other.load_state_dict(off.state_dict())


@on_ranks(2)
def test_calls_at_odd_moments_are_refused_or_change_nothing() -> None:
    import zeropg

    kinds: tuple[Any, ...] = (
        zeropg.optim.Lion,
        torch.optim.Adagrad,
        zeropg.optim.LAMB,
        lambda p: zeropg.optim.Muon(p, ns_dtype="float64"),
    )
    for kind in kinds:
        models = [zeropg.fully_shard(make(), stage=2) for _ in range(2)]
        plain, optimizer = (zeropg.shard_optimizer(kind(model.parameters()), model) for model in models)
        scaler = zeropg.GradScaler(init_scale=1024.0)

        def backward(step: int, *, scaler: Any = scaler, models: Any = models) -> None:
            for model in models:
                model.zero_grad()
            loss_of(models[0], step, [dist.get_rank()]).backward()
            scaler.scale(loss_of(models[1], step, [dist.get_rank()])).backward()

        backward(0)
        scaler.update(512.0)
        with raises(RuntimeError, "GradScaler.unscale_", "scaled by 1024, and the scale is 512"):
            scaler.unscale_(optimizer)
        with raises(RuntimeError, "GradScaler.step", "scaled by 1024, and the scale is 512"):
            scaler.step(optimizer)
        backward(0)
        scaler.unscale_(optimizer)
        scaler.update()
        with raises(RuntimeError, "GradScaler.step", "were unscaled before update()"):
            scaler.step(optimizer)
        for step, is_unscaled in ((0, False), (2, True), (3, False)):  # none of OVERFLOWS
            backward(step)
            if is_unscaled:
                scaler.unscale_(optimizer)
            group = optimizer.param_groups[0]
            rate, group["lr"] = group["lr"], math.nan
            with raises(ValueError, "lr"):
                scaler.step(optimizer)
            group["lr"] = rate
            scaler.step(optimizer)
            scaler.update()
            plain.step()
        with zeropg.full_parameters(models[0]), zeropg.full_parameters(models[1]):
            for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_scaler_takes_values_and_not_tensors() -> None:
    import zeropg

    scaler = zeropg.GradScaler()
    state = {key: torch.tensor(value) for key, value in zeropg.GradScaler(init_scale=64.0).state_dict().items()}
    scaler.load_state_dict(state)
    state["scale"].fill_(3.0)
    assert scaler.get_scale() == 64.0
    scale = torch.tensor(32.0)
    scaler.update(scale)
    scale.fill_(3.0)
    assert scaler.get_scale() == 32.0
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with raises(ValueError, "the scale is", "expected a number > 0"):
            scaler.update(wrong)
        with raises(ValueError, "the scale is", "expected a number > 0"):
            scaler.load_state_dict({**state, "scale": wrong})
    with raises(ValueError, "growth_interval 0"):
        scaler.load_state_dict({**state, "growth_interval": 0})
    assert scaler.get_scale() == 32.0


def two_optimizers(is_sharded: bool, stage: int, program: str) -> list[torch.Tensor]:
    """Layers 0 and 2 have an optimizer each; the parameters after `program`."""
    import zeropg

    model = make()
    ranks = [dist.get_rank()] if is_sharded else [0, 1]
    scaler: Any = zeropg.GradScaler(init_scale=1024.0) if is_sharded else torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = zeropg.fully_shard(model, stage=stage) if is_sharded else model
    optimizers: list[Any] = [torch.optim.SGD(model[layer].parameters(), lr=0.1) for layer in (0, 2)]
    if is_sharded:
        optimizers = [zeropg.shard_optimizer(optimizer, model) for optimizer in optimizers]
    first, second = optimizers
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        x = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
        scaler.scale(torch.stack([model(x[rank]).square().mean() for rank in ranks]).mean()).backward()
        if program == "zeroed apart":
            scaler.step(first)
            first.zero_grad(set_to_none=False)
            scaler.step(second)
            second.zero_grad(set_to_none=False)
        elif program == "unscaled apart":  # and the second one accumulates
            scaler.unscale_(first)
            scaler.step(first)
            first.zero_grad()
            if step == 1:
                scaler.step(second)
        else:  # one overflows alone
            with zeropg.full_gradients(model) if is_sharded else contextlib.nullcontext():
                model[2].weight.grad[0, 0] = torch.inf
            scaler.step(first)
            scaler.step(second)
            model.zero_grad()
        scaler.update()
    values = zeropg.full_state_dict(model, rank0_only=False) if is_sharded else model.state_dict()
    return [value.detach().clone() for value in values.values()]


@pytest.mark.parametrize("program", ["zeroed apart", "unscaled apart", "overflows alone"])
@on_ranks(2)
def test_optimizers_that_share_a_model_are_scaled_and_zeroed_apart(program: str) -> None:
    expected = two_optimizers(False, 0, program)
    for stage in STAGES:
        found = two_optimizers(True, stage, program)
        for value, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)
