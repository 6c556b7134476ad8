"""shard_optimizer against torch.optim, over a fake core in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeropg
from tests.sharding.optim.fake_core import ranks_of, shard, whole_master
from zeropg._native import _C
from zeropg.optim import kernels
from zeropg.optim.shard_optimizer import ShardedOptimizer, shard_optimizer
from zeropg.optim.update.fused import FusedUpdater

Make = Callable[[Any], torch.optim.Optimizer]


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Linear(17, 5), torch.nn.LayerNorm(5))
    return model.to(dtype)


def fill_gradients(model: torch.nn.Module, step: int, skip: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.grad = None if name in skip else gradient


def assert_same(
    sharded: torch.nn.Module, plain: torch.nn.Module, *, relative: float = 1e-13, of_largest: float = 1e-13
) -> None:
    for (name, left), right in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        bound = of_largest * right.abs().max().item()
        torch.testing.assert_close(left, right, rtol=relative, atol=bound, msg=f"{name}: {left} is not {right}")


def train_both(make: Make, steps: int = 12, dtype: torch.dtype = torch.float64, **bounds: float) -> None:
    plain = make_model(dtype)
    sharded = shard(copy.deepcopy(plain))
    reference, optimizer = make(plain.parameters()), shard_optimizer(make(sharded.parameters()), sharded)
    for step in range(steps):
        skip = ("0.bias",) if step in (0, 5) else ()
        fill_gradients(plain, step, skip)
        fill_gradients(sharded, step, skip)
        reference.step()
        optimizer.step()
    assert_same(sharded, plain, **bounds)


ADAM = list(itertools.product((0.0, 0.1), (False, True), (False, True), ((0.9, 0.999), (0.0, 0.5))))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(("weight_decay", "amsgrad", "maximize", "betas"), ADAM)
def test_adam_agrees_with_torch(
    kind: Any, weight_decay: float, amsgrad: bool, maximize: bool, betas: tuple[float, float]
) -> None:
    settings = {"lr": 3e-2, "betas": betas, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
    train_both(lambda parameters: kind(parameters, **settings))


@pytest.mark.parametrize("name", _C.optimizer_names())
def test_every_kernel_agrees_with_its_classes_of_torch(name: str) -> None:
    kernel = kernels.Kernel(name)
    dtype = torch.float32 if kernel.storage else torch.float64
    for torch_class in kernel.torch_classes:

        def make(parameters: Any, torch_class: str = torch_class) -> torch.optim.Optimizer:
            group = {"params": list(parameters), **kernel.torch_flags}
            kind: Any = kernels.class_of(torch_class)
            return kind([group], lr=3e-2)

        model = shard(make_model(dtype))
        optimizer = shard_optimizer(make(model.parameters()), model)
        (updater,) = optimizer._division.updaters  # type: ignore[attr-defined]
        assert updater._kernels.of(optimizer.param_groups[0]).name == name
        train_both(make, dtype=dtype)


class Smoothed(torch.optim.AdamW):
    """A class of zeropg.optim, as a kernel without a class of torch brings one."""


def test_a_kernel_steps_the_class_of_zeropg_optim_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels.Kernel("adamw")
    kernel.torch_classes = ["Smoothed"]
    monkeypatch.setattr(zeropg.optim, "Smoothed", Smoothed, raising=False)
    monkeypatch.setattr(kernels, "_KERNELS", (kernel,))
    monkeypatch.setattr(kernels, "FUSED", kernels.fused_classes((kernel,)))
    model = shard(make_model())
    optimizer = shard_optimizer(Smoothed(model.parameters()), model)
    (updater,) = optimizer._division.updaters  # type: ignore[attr-defined]
    assert isinstance(updater, FusedUpdater) and updater._kernels.default is kernel
    train_both(lambda parameters: Smoothed(parameters, lr=3e-2))


SGD = [
    (momentum, dampening, weight_decay, nesterov, maximize)
    for momentum, dampening, weight_decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.1), (False, True), (False, True)
    )
    if not nesterov or (momentum > 0 and dampening == 0)
]


@pytest.mark.parametrize(("momentum", "dampening", "weight_decay", "nesterov", "maximize"), SGD)
def test_sgd_agrees_with_torch(
    momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool
) -> None:
    settings = {"lr": 3e-2, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    train_both(lambda parameters: torch.optim.SGD(parameters, nesterov=nesterov, maximize=maximize, **settings))


@pytest.mark.parametrize("initial", [0.0, 0.3])
@pytest.mark.parametrize(("lr_decay", "weight_decay", "maximize"), [(0.0, 0.0, False), (0.1, 0.1, True)])
def test_adagrad_agrees_with_torch(initial: float, lr_decay: float, weight_decay: float, maximize: bool) -> None:
    settings = {"lr": 3e-2, "lr_decay": lr_decay, "weight_decay": weight_decay, "initial_accumulator_value": initial}
    train_both(lambda parameters: torch.optim.Adagrad(parameters, maximize=maximize, **settings))


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_float32_stays_within_1e_6_of_torch_after_100_steps(implementation: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, **{implementation: True})

    train_both(make, steps=100, dtype=torch.float32, relative=1e-6, of_largest=2e-6)


ELEMENTWISE: list[Make] = [
    lambda p: torch.optim.Adadelta(p, lr=0.5),
    lambda p: torch.optim.Adamax(p, lr=0.1, weight_decay=0.1),
    lambda p: torch.optim.ASGD(p, lr=0.1, t0=3),
    lambda p: torch.optim.NAdam(p, lr=0.1, decoupled_weight_decay=True),
    lambda p: torch.optim.RAdam(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    lambda p: torch.optim.Rprop(p, lr=0.1),
]


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_elementwise_optimizers_agree_with_torch(make: Make) -> None:
    train_both(make)


@pytest.mark.parametrize(
    "make", [ELEMENTWISE[1], lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: zeropg.optim.Lion(p, lr=0.1)]
)
def test_ranks_together_equal_one_rank(make: Make) -> None:
    model = make_model()
    results = []
    for world_size in (1, 2, 3, 4):
        ranks = ranks_of(model, world_size)
        for rank in ranks:
            optimizer = shard_optimizer(make(rank.parameters()), rank)
            for step in range(4):
                fill_gradients(rank, step)
                optimizer.step()
        results.append(whole_master(ranks))
    used = min(len(result) for result in results)
    for result in results[1:]:
        torch.testing.assert_close(result[:used], results[0][:used], rtol=1e-15, atol=1e-16)
        if make is not ELEMENTWISE[1]:
            assert result[:used].equal(results[0][:used])


def test_param_groups_keep_their_own_settings() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        weights, biases = [], []
        for parameter in parameters:
            (weights if parameter.dim() > 1 else biases).append(parameter)
        return torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.5, "amsgrad": True}, {"params": biases, "lr": 0.3}], lr=1e-2
        )

    train_both(make)


def test_neighbours_of_one_group_are_stepped_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    ranges = []

    class Kernel:
        def state_slots(self, hyperparameters: dict[str, float]) -> list[_C.StateSlot]:
            return _C.make_optimizer("adamw").state_slots(hyperparameters)

        def step(self, *args: Any, range: tuple[int, int], **kwargs: Any) -> None:
            ranges.append(range)

    monkeypatch.setattr(optimizer._division.updaters[0]._kernels.default, "optimizer", Kernel())  # type: ignore[attr-defined]
    fill_gradients(model, 0)
    optimizer.step()
    last = model._zeropg.flat_groups[0].segments[-1]  # type: ignore
    assert ranges == [(0, last[3])]
    ranges.clear()
    fill_gradients(model, 0, skip=("0.bias",))
    optimizer.step()
    assert len(ranges) == 2


def test_16_bit_parameters_follow_float32_masters() -> None:
    model = make_model(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    shard(model, master_dtype=torch.float32)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    torch_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(10):
        fill_gradients(model, step)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.float()
        optimizer.step()
        torch_optimizer.step()
    flat = model._zeropg.flat_groups[0]  # type: ignore
    assert flat.parameter_out.equal(flat.master.to(torch.bfloat16))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-6)


def test_16_bit_parameters_follow_masters_with_an_elementwise_torch_optimizer() -> None:
    model = shard(make_model(torch.bfloat16), master_dtype=torch.float32)
    optimizer = shard_optimizer(torch.optim.RMSprop(model.parameters(), lr=1e-2), model)
    fill_gradients(model, 0, skip=("0.bias",))
    before = copy.deepcopy(model[0])
    optimizer.step()
    flat = model._zeropg.flat_groups[0]  # type: ignore
    assert flat.parameter_out.equal(flat.master.to(torch.bfloat16))
    assert model[0].bias.equal(before.bias)
    assert not model[0].weight.equal(before.weight)
    assert optimizer.state[model[0].weight]["square_avg"].dtype == torch.float32


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=0.1), ELEMENTWISE[6]])
def test_a_gradient_factor_scales_the_gradient_once(make: Make) -> None:
    plain = make_model()
    sharded = shard(copy.deepcopy(plain))
    reference, optimizer = make(plain.parameters()), shard_optimizer(make(sharded.parameters()), sharded)
    for step, factor in enumerate((0.25, 1.0)):
        fill_gradients(plain, step)
        fill_gradients(sharded, step)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor
        if factor != 1.0:
            optimizer.gradient_factor = factor  # type: ignore[attr-defined]
        reference.step()
        optimizer.step()
    assert_same(sharded, plain)
    assert sharded._zeropg.calls == ["begin_step", "end_step"] * 2  # type: ignore


# --- torch.optim.Optimizer's behaviour ---


def sharded_adamw(**settings: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = shard(make_model())
    original = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    return model, original, shard_optimizer(original, model)


def test_a_scheduler_made_before_still_acts_without_a_warning() -> None:
    model = shard(make_model())
    original = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(original, 1, gamma=0.5)
    optimizer = shard_optimizer(original, model)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            fill_gradients(model, 0)
            optimizer.step()
            before.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    after.step()
    assert original.param_groups[0]["lr"] == pytest.approx(0.0125)
    assert all(ours is theirs for ours, theirs in zip(optimizer.param_groups, original.param_groups, strict=True))


def test_loading_keeps_the_shared_dictionaries() -> None:
    model, original, optimizer = sharded_adamw()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.7
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group is original.param_groups[0]
    assert group["lr"] == 0.7
    assert group["params"][0] is next(model.parameters())


@pytest.mark.parametrize("call", ["step", "load_state_dict", "add_param_group"])
def test_the_old_optimizer_refuses(call: str) -> None:
    _, original, _ = sharded_adamw()
    with pytest.raises(RuntimeError, match="use the one it returned"):
        getattr(original, call)({})


def test_hooks_run_once_and_those_of_the_old_optimizer_too() -> None:
    model = shard(make_model())
    seen = []
    original = torch.optim.RMSprop(model.parameters())
    original.register_step_pre_hook(lambda *args: seen.append("pre"))
    optimizer = shard_optimizer(original, model)
    optimizer.register_step_post_hook(lambda optimizer, *args: seen.append(type(optimizer).__name__))
    everywhere = register_optimizer_step_post_hook(lambda *args: seen.append("global"))
    fill_gradients(model, 0)
    optimizer.step()
    everywhere.remove()
    assert sorted(seen) == ["ShardedOptimizer", "global", "pre"]


def test_a_closure_is_evaluated_once_with_gradients() -> None:
    model, _, optimizer = sharded_adamw()
    inputs = torch.ones(3, 9, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean() + model[0].weight.sum()
        loss.backward()
        return loss

    before = model[0].weight.clone()
    loss = optimizer.step(closure)
    assert loss is not None and loss.requires_grad
    assert not model[0].weight.equal(before)


def test_zero_grad_drops_or_zeroes() -> None:
    model, _, optimizer = sharded_adamw()
    fill_gradients(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert model._zeropg.calls == ["zero_gradients"]  # type: ignore
    assert model[0].weight.grad is not None
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_a_tensor_learning_rate_is_read_in_each_step() -> None:
    model = shard(make_model())
    rate = torch.tensor(0.0)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
    before = model[0].weight.clone()
    fill_gradients(model, 0)
    optimizer.step()
    assert model[0].weight.equal(before)
    rate.fill_(1.0)
    optimizer.step()
    assert not model[0].weight.equal(before)


def test_frozen_parameters_may_stand_in_a_group() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    shard(model)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    fill_gradients(model, 0, skip=("0.weight",))
    before = model[0].weight.clone(), model[0].bias.clone()
    optimizer.step()
    assert model[0].weight.equal(before[0])
    assert not model[0].bias.equal(before[1])


def test_add_param_group_adds_parameters_of_the_model() -> None:
    model = shard(make_model())
    with pytest.warns(UserWarning, match=r"0\.weight"):
        optimizer = shard_optimizer(torch.optim.AdamW(model[2].parameters(), lr=0.1), model)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.0})
    optimizer.add_param_group({"params": model[3].weight})
    fill_gradients(model, 0)
    before = copy.deepcopy(list(model[0].parameters())), model[3].weight.clone(), model[3].bias.clone()
    optimizer.step()
    assert all(now.equal(then) for now, then in zip(model[0].parameters(), before[0], strict=True))
    assert not model[3].weight.equal(before[1])
    assert model[3].bias.equal(before[2])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match="not a parameter of the sharded model"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_ignored_parameters_are_stepped_whole() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    plain = make_model()
    sharded = copy.deepcopy(plain)
    sharded[0].weight.requires_grad_(False)  # the fake shards trainable parameters only
    shard(sharded)
    sharded[0].weight.requires_grad_(True)
    reference, optimizer = make(plain.parameters()), shard_optimizer(make(sharded.parameters()), sharded)
    for step in range(3):
        fill_gradients(plain, step)
        fill_gradients(sharded, step)
        reference.step()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(sharded, plain)
    assert {state.name for state in optimizer.local_state()} == dict(sharded.named_parameters()).keys()  # type: ignore


# --- refusals ---


class Custom(torch.optim.SGD):
    pass


class Declared(torch.optim.SGD):
    zeropg_elementwise = True


class FusedLAMB(torch.optim.SGD):
    pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_options_are_checked_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        model = shard(make_model().float())
        shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), NotImplementedError, "LBFGS does not work on shards: .*closure"),
        (lambda m: torch.optim.SparseAdam(m.parameters()), NotImplementedError, "SparseAdam .* dense; use Adam"),
        (lambda m: FusedLAMB(m.parameters()), NotImplementedError, r"FusedLAMB .* layers; use zeropg\.optim\.LAMB"),
        (lambda m: Custom(m.parameters()), NotImplementedError, r"Custom\.zeropg_elementwise = True"),
        (lambda m: torch.optim.AdamW(m.parameters(), capturable=True), NotImplementedError, "capturable=True .*graph"),
        (lambda m: torch.optim.SGD(m.parameters(), differentiable=True), NotImplementedError, "differentiable=True"),
        (
            lambda m: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]),
            ValueError,
            r"parameter 0 .* shape \[2\], is not",
        ),
        (lambda m: object(), TypeError, "expected a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make: Any, error: type[Exception], words: str) -> None:
    model = shard(make_model())
    with pytest.raises(error, match=words):
        shard_optimizer(make(model), model)


def test_a_step_that_was_replaced_on_the_object_is_refused() -> None:
    model = shard(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # schedulers wrap the step, and are taken
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    shard_optimizer(optimizer, model)
    bound = torch.optim.AdamW(model.parameters())
    bound.step = bound.step  # type: ignore[method-assign]  # what accelerate leaves there
    shard_optimizer(bound, model)
    for wrap in (lambda function: function, functools.wraps(torch.optim.SGD(model.parameters()).step)):
        other = torch.optim.SGD(model.parameters())
        step = other.step
        other.step = wrap(lambda closure=None, step=step: step(closure))  # type: ignore[method-assign]
        with pytest.raises(NotImplementedError, match=r"step of this SGD was replaced .* register_step_pre_hook"):
            shard_optimizer(other, model)


def test_a_class_that_says_it_is_elementwise_is_taken() -> None:
    train_both(lambda parameters: Declared(parameters, lr=0.1, momentum=0.9))


class Cooling(Declared):
    """Its param groups count steps."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        super().step()


def test_what_a_class_writes_to_its_param_groups_counts() -> None:
    train_both(lambda parameters: Cooling(parameters, lr=0.1, momentum=0.9))
    model = shard(make_model())
    optimizer = shard_optimizer(Cooling(model.parameters(), lr=0.1), model)
    for step in range(3):
        fill_gradients(model, step)
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == optimizer.state_dict()["param_groups"][0]["steps"] == 3


class Counting(Declared):
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moments"] = torch.zeros(3)


def test_state_that_is_not_per_element_is_named_where_it_is_saved() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(Counting(model.parameters(), lr=0.1), model)
    fill_gradients(model, 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"state 'moments' of .* 3 elements; expected \d+, .* tensor called 'step'"):
        list(optimizer.local_state())


def test_a_model_that_is_not_sharded_is_refused() -> None:
    model = make_model()
    with pytest.raises(TypeError, match=r"call zeropg\.fully_shard"):
        shard_optimizer(torch.optim.SGD(model.parameters()), model)


def test_sharding_twice_is_refused() -> None:
    model, original, optimizer = sharded_adamw()
    with pytest.raises(TypeError, match="sharded already"):
        shard_optimizer(optimizer, model)
    with pytest.raises(TypeError, match="use what that call returned"):
        shard_optimizer(original, model)


def test_overlap_step_is_none_or_a_bool() -> None:
    model = shard(make_model())
    original = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="overlap_step"):
        shard_optimizer(original, model, overlap_step="yes")  # type: ignore[arg-type]
    shard_optimizer(original, model, overlap_step=False)


def test_torchs_grad_scaler_is_refused() -> None:
    model, _, optimizer = sharded_adamw(fused=True)
    fill_gradients(model, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(NotImplementedError, match=r"use zeropg\.GradScaler"):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_copies_are_refused() -> None:
    _, _, optimizer = sharded_adamw()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.copy(optimizer)


def test_it_is_a_torch_optimizer() -> None:
    _, _, optimizer = sharded_adamw()
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, ShardedOptimizer)
    assert "lr: 0.1" in repr(optimizer)
