"""Conformance suite of Fetch (sharding/fetch/fetch.h): a new one is a line in FETCHES."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import close, equal, raises
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import THIS_MACHINE, Place, RankPool, SeparateHosts


class Case(NamedTuple):
    backend: str
    stage: int
    is_collective: bool  # then all ranks run their units in the same order
    worlds: tuple[int, ...] = (1, 2, 3)
    place: Place = THIS_MACHINE


FETCHES = {
    "replicated": Case("zeropg", 2, is_collective=False),
    "shared": Case("zeropg", 3, is_collective=False),
    "gathered": Case("gloo", 3, is_collective=True),
    "gathered per node": Case("zeropg", 3, True, worlds=(4,), place=SeparateHosts(hosts=(0, 1, 0, 1))),
}


def sharded(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Ranks start from different weights: those of rank 0 count."""
    return zeropg.fully_shard(make_model(dtype, seed=dist.get_rank()), stage=case.stage)


def check_what_it_says_of_itself(case: Case, name: str) -> None:
    core = sharded(case)._zeropg
    assert core.fetch_name == name
    assert core.fetch_is_collective == (case.is_collective and dist.get_world_size() > 1)


def check_every_rank_sees_the_values_of_rank_0(case: Case, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = sharded(case, dtype)
        wanted = make_model(dtype, seed=0).state_dict()
        with zeropg.full_parameters(model):
            assert all(equal(value, wanted[key]) for key, value in model.named_parameters())


def check_units_are_whole_while_they_run_and_only_then(case: Case, name: str) -> None:
    model = sharded(case)
    block = model.blocks[1]
    wanted = make_model(seed=0).blocks[1].up.weight
    seen = []
    block.up.register_forward_hook(lambda *_: seen.append(equal(block.up.weight.detach().clone(), wanted)))
    loss = loss_of(model, make_batches(1)[0])
    assert seen == [True]
    if case.stage == 3:
        with raises(RuntimeError, "blocks.1.up.weight", "full_parameters"):
            block.up.weight.sum()
    loss.backward()
    if case.stage == 3:
        with raises(RuntimeError, "blocks.1.up.weight"):
            block.up.weight.sum()


def check_an_update_is_seen_by_every_rank(case: Case, name: str) -> None:
    model, plain = sharded(case, torch.float64), make_model(torch.float64, seed=0)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in make_batches(3):
        losses = [loss_of(model, batch), loss_of(plain, batch)]
        assert close(*losses)
        for loss in losses:
            loss.backward()
        for stepper in (optimizer, plain_optimizer):
            stepper.step()
            stepper.zero_grad()


def check_writable_parameters_are_private_until_they_are_given_back(case: Case, name: str) -> None:
    model = sharded(case)
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(index + 0.5)
    with zeropg.full_parameters(model):
        for index, parameter in enumerate(model.parameters()):
            assert bool((parameter == index + 0.5).all()), index


def check_ranks_may_run_units_in_any_order_unless_the_fetch_is_collective(case: Case, name: str) -> None:
    if case.is_collective:
        return  # tests/sharding/module/test_bad_input.py shows the error
    model = sharded(case)
    x = torch.ones(1, 3, 36)
    blocks = list(model.blocks)
    plain = list(make_model(seed=0).blocks)
    order = [0, 2, 1] if dist.get_rank() == 0 else [1]
    for index in order:
        assert close(blocks[index](x), plain[index](x), 1e-6)


def check_memory_is_what_the_stage_promises(case: Case, name: str) -> None:
    model = sharded(case)
    numel = sum(parameter.numel() for parameter in model.parameters())
    bytes_held = model._zeropg.memory_report()["parameters"]
    share = 1 if case.stage < 3 else dist.get_world_size()
    assert 4 * numel / share <= bytes_held <= 4 * numel / share * 1.1


def check_torch_func_takes_gradients_of_inputs(case: Case, name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    model = copy.deepcopy(plain)
    zeropg.fully_shard(model, stage=case.stage, units=[model[0], model[2]])
    x = torch.randn(3, 16)
    wanted = torch.func.grad(lambda x: plain(x).square().sum())(x)
    for _ in range(2):
        assert equal(torch.func.grad(lambda x: model(x).square().sum())(x), wanted)
    loss = model(x).square().sum()
    loss.backward()
    assert torch.isfinite(zeropg.clip_grad_norm_(model, 1.0))


def check_backwards_of_what_transforms_made_have_whole_units(case: Case, name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model = copy.deepcopy(plain)
    zeropg.fully_shard(model, stage=case.stage, units=[model[0], model[2]])
    x, v = torch.randn(2, 3, 5)

    def forward_mode(module: nn.Module) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, v)
            return torch.autograd.forward_ad.unpack_dual(module(dual)).tangent

    transforms: list[Callable[[nn.Module], torch.Tensor]] = [
        lambda module: torch.func.vmap(module)(x),
        lambda module: torch.func.jvp(module, (x,), (v,))[1],  # a graph that is left, as units that it made whole are
        lambda module: torch.func.jvp(module, (x,), (v,))[1],
        lambda module: torch.func.vmap(torch.func.grad(lambda row: module(row).square().sum()))(x),
        lambda module: torch.func.jacfwd(module)(x[0]),
        forward_mode,
    ]
    for index, transform in enumerate(transforms):
        results = [transform(module) for module in (model, plain)]
        assert close(*results, 1e-6), index
        for module, result in zip((model, plain), results, strict=True):
            if index != 1:
                module.zero_grad()
                result.square().sum().backward()
        with zeropg.full_gradients(model):
            for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert (parameter.grad is None) == (wanted.grad is None), index
                assert wanted.grad is None or close(parameter.grad, wanted.grad, 1e-5), index


CHECKS: dict[str, Callable[[Case, str], None]] = {
    key.removeprefix("check_"): value for key, value in list(globals().items()) if key.startswith("check_")
}


def run_checks(name: str) -> dict[str, str]:
    torch.set_num_threads(1)
    failures = {}
    for check_name_, check in CHECKS.items():
        try:
            check(FETCHES[name], name)
        except AssertionError as error:
            failures[check_name_] = repr(error)
    return failures


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, size) for name, case in FETCHES.items() for size in case.worlds]
)
def test_fetch(rank_pool: Callable[..., RankPool], name: str, world_size: int) -> None:
    case = FETCHES[name]
    for failures in rank_pool(world_size, case.backend, case.place).run(run_checks, name, timeout=120):
        assert not failures
