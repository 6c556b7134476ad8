"""What programs do to param groups once an optimizer is made: right, or an error before anything is stepped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.test_momentum_optimizers import dgc, make_ddp, one_bit_adam, one_bit_lamb, own_part, train
from tests.optim.test_on_sharded_models import make_sharded
from tests.sharding.optim.fake_core import shard
from tests.sharding.optim.test_shard_optimizer import assert_same, fill_gradients, make_model
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_batches
from zeropg.optim import LAMB, Lion, Muon
from zeropg.optim.shard_optimizer import shard_optimizer

Make = Callable[[Any], torch.optim.Optimizer]
OURS: dict[str, Make] = {
    "LAMB": lambda p: LAMB(p, 0.1),
    "Lion": lambda p: Lion(p, 0.1),
    "Muon": lambda p: Muon(p, 0.1),
}
TORCHS: dict[str, Make] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
WRONG = {"lr": math.nan, "weight_decay": math.nan, "eps": math.nan, "betas": (0.9, 1.0), "momentum": math.nan}
WRONG_OURS = {**WRONG, "eps": -1.0, "weight_decay": -0.1, "adamw_eps": -1.0, "bounds": (1.0, 0.5), "ns_dtype": "int"}


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others}]


def expect_refusal(model: nn.Module, optimizer: torch.optim.Optimizer, wrong: dict[str, Any]) -> None:
    """Each wrong value in the last group stops the step before the first group's parameters have moved."""
    group = optimizer.param_groups[-1]
    for key, value in wrong.items():
        if key not in group:
            continue
        before, right = values(model), group[key]
        group[key] = value
        fill_gradients(model, 0)
        with pytest.raises(ValueError, match=r"\[zeropg\]"):
            optimizer.step()
        group[key] = right
        assert all(now.equal(then) for now, then in zip(model.parameters(), before, strict=True)), key
        optimizer.step()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_value_out_of_range_stops_a_step_of_ours(name: str, is_sharded: bool) -> None:
    model = make_model(torch.float32)
    optimizer = OURS[name](in_two_groups(model))
    expect_refusal(model, shard_optimizer(optimizer, shard(model)) if is_sharded else optimizer, WRONG_OURS)


@pytest.mark.parametrize("name", TORCHS)
def test_a_value_that_no_kernel_takes_stops_the_step_of_every_group(name: str) -> None:
    model = shard(make_model())
    expect_refusal(model, shard_optimizer(TORCHS[name](in_two_groups(model)), model), WRONG)


@pytest.mark.parametrize("name", TORCHS)
def test_other_values_do_what_they_do_in_torch(name: str) -> None:
    plain = make_model()
    model = shard(copy.deepcopy(plain))
    reference = TORCHS[name](in_two_groups(plain))
    optimizer = shard_optimizer(TORCHS[name](in_two_groups(model)), model)
    edits = [{"lr": -0.2}, {"lr": torch.tensor(0.3).double(), "weight_decay": -0.1}, {"eps": -3.0}, {"momentum": 1.5}]
    for step, edit in enumerate(edits):
        for each, of in ((reference, plain), (optimizer, model)):
            each.param_groups[1].update({key: value for key, value in edit.items() if key in each.param_groups[1]})
            fill_gradients(of, step)
            each.step()
    assert_same(model, plain)


@pytest.mark.parametrize("name", OURS)
def test_a_negative_or_tensor_lr_counts_in_ours(name: str) -> None:
    plain, model = make_model(), shard(make_model())
    reference, optimizer = OURS[name](plain.parameters()), shard_optimizer(OURS[name](model.parameters()), model)
    for step, lr in enumerate((0.1, torch.tensor(0.2), -1e-20, -0.1)):
        for each, of in ((reference, plain), (optimizer, model)):
            each.param_groups[0]["lr"] = lr
            fill_gradients(of, step)
            each.step()
    assert_same(model, plain, relative=1e-6, of_largest=1e-6)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_added_group_is_checked_as_the_first(name: str, is_sharded: bool) -> None:
    model = make_model(torch.float32)
    optimizer = OURS[name]([model[0].weight])
    if is_sharded:
        with pytest.warns(UserWarning, match="no param group holds"):
            optimizer = shard_optimizer(optimizer, shard(model))
    for wrong in ({"lr": -1.0}, {"weight_decay": -1.0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(ValueError, match=f"{name}: lr"):
            optimizer.add_param_group({"params": [model[0].bias], **wrong})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=f"{name}: lr"):
        OURS[name]([{"params": [model[0].bias], "lr": -1.0}])


def test_an_added_group_of_torchs_classes_is_checked() -> None:
    model = shard(make_model())
    with pytest.warns(UserWarning, match="no param group holds"):
        optimizer = shard_optimizer(torch.optim.AdamW([model[0].weight]), model)
        muon = shard_optimizer(torch.optim.Muon([model[2].weight]), model)
    with pytest.raises(ValueError, match="beta1 is 1"):
        optimizer.add_param_group({"params": [model[0].bias], "betas": (1.0, 0.9)})
    with pytest.raises(ValueError, match=r"takes matrices only, and a param group has shapes \[\[5\]"):
        muon.add_param_group({"params": [model[2].bias]})
    with pytest.raises(ValueError, match="is not a parameter of the sharded model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == len(muon.param_groups) == 1


def test_a_parameter_that_takes_the_place_of_another_is_stepped() -> None:
    plain = make_model()
    model = shard(copy.deepcopy(plain))
    reference = torch.optim.AdamW([plain[0].weight, plain[2].weight], lr=0.1)
    with pytest.warns(UserWarning, match="no param group holds"):
        optimizer = shard_optimizer(torch.optim.AdamW([model[0].weight, model[2].weight], lr=0.1), model)
    for step in range(3):
        fill_gradients(plain, step)
        fill_gradients(model, step)
        reference.step()
        optimizer.step()
        reference.param_groups[0]["params"][1] = plain[0].bias
        optimizer.param_groups[0]["params"][1] = model[0].bias
    assert_same(model, plain)


def test_a_parameter_in_two_groups_is_an_error() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.AdamW(in_two_groups(model)), model)
    optimizer.param_groups[1]["params"].append(model[0].weight)
    fill_gradients(model, 0)
    with pytest.raises(ValueError, match="is in param groups 0 and 1"):
        optimizer.step()


# --- use_muon ---


@pytest.mark.parametrize("use_muon", [False, True])
def test_use_muon_may_change_before_the_first_step(use_muon: bool) -> None:
    plain = make_model(torch.float32)
    model = shard(copy.deepcopy(plain))
    groups = [{"params": [model[0].weight], "use_muon": not use_muon}, {"params": [model[2].weight]}]
    with pytest.warns(UserWarning, match="no param group holds"):
        optimizer = shard_optimizer(Muon(groups), model)
    reference = Muon([{"params": [plain[0].weight], "use_muon": use_muon}, {"params": [plain[2].weight]}])
    optimizer.param_groups[0]["use_muon"] = use_muon
    for step in range(3):
        fill_gradients(plain, step)
        fill_gradients(model, step)
        reference.step()
        optimizer.step()
    assert optimizer.state[model[0].weight].keys() == reference.state[plain[0].weight].keys()
    assert_same(model, plain, relative=1e-6, of_largest=1e-6)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("use_muon", [False, True])
def test_use_muon_may_not_change_afterwards(use_muon: bool, is_sharded: bool) -> None:
    model = make_model(torch.float32)
    optimizer: torch.optim.Optimizer = Muon(
        [{"params": list(model[2:].parameters())}, {"params": [model[0].weight], "use_muon": not use_muon}]
    )
    if is_sharded:
        with pytest.warns(UserWarning, match="no param group holds"):
            optimizer = shard_optimizer(optimizer, shard(model))
    fill_gradients(model, 0)
    optimizer.step()
    before = values(model)
    optimizer.param_groups[1]["use_muon"] = use_muon
    with pytest.raises((RuntimeError, ValueError), match="use_muon of"):
        optimizer.step()
    assert all(now.equal(then) for now, then in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[1]["use_muon"] = not use_muon
    optimizer.step()


def test_a_loaded_use_muon_counts() -> None:
    models = [shard(make_model(torch.float32)) for _ in range(2)]
    optimizers = [
        shard_optimizer(Muon([{"params": list(model.parameters()), "use_muon": use_muon}]), model)
        for model, use_muon in zip(models, (False, None), strict=True)
    ]
    for step in range(4):
        if step == 2:
            models[1]._zeropg.flat_groups[0].master.copy_(models[0]._zeropg.flat_groups[0].master)  # type: ignore
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model, optimizer in zip(models, optimizers, strict=True):
            fill_gradients(model, step)
            optimizer.step()
    assert_same(*models, relative=0, of_largest=0)


# --- optimizers that average momenta ---


@on_ranks(2)
def test_optimizers_that_average_momenta_check_their_groups() -> None:
    batches = make_batches(12)
    for make in (one_bit_adam, one_bit_lamb, dgc):
        who = {one_bit_adam: "OneBitAdam", one_bit_lamb: "OneBitLamb", dgc: "DGC"}[make]
        wrong = {"lr": math.nan, "weight_decay": -1.0, "betas": (0.9, 1.0), "eps": -1.0, "momentum": 1.0}
        for is_sharded in (False, True):
            model, optimizer = make_sharded(make, 1)[:2] if is_sharded else make_ddp(make)
            (group,) = optimizer.param_groups
            for key in wrong.keys() & group.keys():
                right, group[key] = group[key], wrong[key]
                with raises(ValueError, f"[zeropg] {who}: lr", f"{key} {wrong[key]}"):
                    train(model, optimizer, batches[:1])
                group[key] = right
                optimizer.zero_grad()
            train(model, optimizer, batches[:1])
            with raises(RuntimeError, "add_param_group", "has its model already"):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@on_ranks(2)
def test_warm_up_does_not_begin_again() -> None:
    batches = make_batches(5)
    for make in (one_bit_adam, one_bit_lamb):
        model, optimizer = make_sharded(make, 1, warmup_steps=3)[:2]
        train(model, optimizer, batches[:3])
        optimizer.param_groups[0]["warmup_steps"] = 9
        with raises(RuntimeError, "step: by warmup_steps", "left them to each rank"):
            train(model, optimizer, batches[3:])
        for steps, words in ((3, "left them to each rank"), (4, "step: warm-up was over")):
            ddp, attached = make_ddp(make, warmup_steps=3)
            train(ddp, attached, batches[:steps])
            if steps == 3:
                loss_of(ddp, own_part(batches[3])).backward()
            attached.param_groups[0]["warmup_steps"] = 9
            if steps == 4:
                loss_of(ddp, own_part(batches[4])).backward()
            with raises(RuntimeError, words):
                attached.step()
