"""The rules of OneBitAdam, OneBitLamb and DGC for themselves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.sharding.ranks import on_ranks
from zeropg.optim import DGC, OneBitLamb
from zeropg.optim.adam_rule import adamw_, begin
from zeropg.optim.dgc import density_at, was_sent
from zeropg.optim.lamb import trust_ratio
from zeropg.optim.momentum_optimizer import clip_gradients_, local_clip
from zeropg.optim.one_bit_adam import FrozenDenominators, freeze, frozen_adam_
from zeropg.optim.one_bit_lamb import blend, next_factor
from zeropg.optim.part import Part

GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}


def make_part(weight: torch.Tensor, gradient: torch.Tensor) -> Part:
    return Part(weight, weight, gradient, 0, weight.numel(), GROUP, {})


def test_the_density_falls_by_fours_in_equal_stages() -> None:
    assert [density_at(step, 8, 0.001) for step in range(10)] == [
        *[0.25, 0.25, 0.0625, 0.0625],
        *[0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001],
    ]
    assert density_at(0, 0, 0.01) == 0.01
    assert density_at(0, 100, 0.5) == 0.5


def test_what_was_sent_is_told_by_what_is_owed() -> None:
    added = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    before = [(0, torch.tensor([1.0, 0.0, -1.0]))]
    after = [(0, torch.tensor([2.0, 0.0, 0.001]))]  # the last is a rounding error
    average = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0])
    assert was_sent(added, average, before, after).tolist() == [False, True, True, False, True]


def test_lambs_coefficients_stay_within_their_bounds() -> None:
    assert trust_ratio(0.0, 1.0) == trust_ratio(1.0, 0.0) == 1.0
    assert trust_ratio(1e9, 1.0) == 10.0 and trust_ratio(1.0, 1e9) == 0.01
    assert blend(0.0, 3.0, 0.9) == 3.0 and blend(1.0, 2.0, 0.9) == pytest.approx(1.1)
    assert next_factor(1.0, 9.0, {}) == pytest.approx(1.1) and next_factor(1.0, 0.0, {}) == pytest.approx(0.9)
    assert next_factor(3.9, 9.0, {}) == 4.0 and next_factor(0.51, 0.0, {}) == 0.5
    own = {"factor_change": 0.5, "factor_bounds": (0.8, 1.3)}
    assert next_factor(1.0, 9.0, own) == 1.3 and next_factor(1.0, 0.0, own) == 0.8
    assert next_factor(1.0, 1.2, own) == 1.2


def test_ranks_clip_their_own_gradients_so_that_the_average_of_independent_ones_fits() -> None:
    assert local_clip(1.0, 1) == 1.0 and local_clip(0.5, 4) == 1.0
    parts = [make_part(torch.zeros(1), torch.tensor([value])) for value in (3.0, 4.0)]
    clip_gradients_(parts, 1.0)
    assert [part.gradient.item() for part in parts] == pytest.approx([0.6, 0.8], rel=1e-5)
    clip_gradients_(parts, 2.0)
    assert [part.gradient.item() for part in parts] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_the_frozen_step_is_adams_with_that_variance() -> None:
    part = make_part(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
    begin(part)
    adamw_(part)
    assert part.weight.tolist() == pytest.approx([0.9, 1.0])
    freeze(part, "test")
    assert part.state["exp_avg_sq"].tolist() == pytest.approx([4.0, 0.0])
    part.state["exp_avg"].copy_(torch.tensor([0.38, 0.5]))  # the second is what an encoding added
    part.state["step"] += 1
    denominators = FrozenDenominators()
    frozen_adam_([part], denominators)
    assert part.weight.tolist() == pytest.approx([0.9 - 0.1 * (0.38 / 0.19) / 2.0, 1.0])
    part.state["exp_avg_sq"].copy_(torch.tensor([16.0, 1.0]))  # as loading does
    frozen_adam_([part], denominators)
    assert part.weight.tolist() == pytest.approx([0.8 - 0.1 * (0.38 / 0.19) / 4.0, 1.0 - 0.1 * (0.5 / 0.19)])


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(2)
def test_dgc_that_sends_everything_forgets_the_momentum_of_matrices_only(nesterov: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    weight, bias = model.weight.detach().clone(), nn.Parameter(model.bias.detach().clone())
    optimizer = DGC(model.parameters(), 0.1, 0.9, ratio=1.0, nesterov=nesterov)
    sgd = torch.optim.SGD([bias], 0.1, 0.9, nesterov=nesterov)
    ddp = DDP(model)
    optimizer.attach(ddp)
    for step in range(5):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        ddp(torch.randn(4, 64, generator=generator)).square().mean().backward()
        averages = [parameter.grad.clone() for parameter in model.parameters()]
        for average in averages:
            dist.all_reduce(average, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        weight -= 0.1 * averages[0] * (1.9 if nesterov else 1.0)
        bias.grad = averages[1]
        sgd.step()
        torch.testing.assert_close(model.bias, bias, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(model.weight, nn.Parameter(weight), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dgc_sends_a_value_once_and_keeps_the_rest() -> None:
    """Algorithm 1 in plain torch: each rank's largest by magnitude, of what its momentum has added up to."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    optimizer = DGC(model.parameters(), 0.1, 0.9, ratio=0.1)
    ddp = DDP(model)
    optimizer.attach(ddp)
    weight = model.weight.detach().clone()
    momentum, unsent = torch.zeros(64, 64), torch.zeros(64, 64)
    for step in range(6):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        ddp(torch.randn(4, 64, generator=generator)).square().mean().backward()
        momentum = 0.9 * momentum + model.weight.grad
        unsent += momentum
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        mine = optimizer.state[model.weight]["momentum_buffer"] == 0
        assert mine.sum() == pytest.approx(410, abs=8)  # of 4096
        assert unsent[mine].abs().min() >= unsent[~mine].abs().max()
        arrived = torch.where(mine, unsent, 0.0)
        dist.all_reduce(arrived, dist.ReduceOp.AVG)
        torch.testing.assert_close(before - model.weight.detach(), 0.1 * arrived, rtol=1e-3, atol=1e-6)
        momentum.masked_fill_(mine, 0.0)
        unsent.masked_fill_(mine, 0.0)
    assert not torch.equal(weight, model.weight)


@on_ranks(2)
def test_warm_up_of_lamb_scales_each_layer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = OneBitLamb(model.parameters(), 0.1, weight_decay=0.01, warmup_steps=3, bounds=(0.01, 0.15))
    ddp = DDP(model)
    optimizer.attach(ddp)
    before = model.weight.detach().clone()
    ddp(torch.randn(4, 8)).square().mean().backward()
    gradient = model.weight.grad
    update = gradient / (gradient.abs() + 1e-6) + 0.01 * before  # Adam's first step
    optimizer.step()
    expected = before - 0.1 * (before.norm() / update.norm()).clamp(0.01, 0.15) * update
    assert before.norm() / update.norm() > 0.15
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-4, atol=1e-6)
