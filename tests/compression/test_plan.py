"""Which parameters travel encoded."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.sharding.ranks import on_ranks
from zeropg.compression import BlockQuant, Plan, State, TopK, ddp_hook


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 4, bias=False))


def test_norms_biases_small_and_excluded_parameters_travel_as_they_are() -> None:
    plan = Plan(gradients=BlockQuant(4), exclude=("0.*",))
    names = [name for name, parameter in make_model().named_parameters() if plan.encodes(name, parameter)]
    assert names == ["2.weight"]
    assert Plan(gradients=BlockQuant(4), min_elements=0).encodes("3.weight", torch.zeros(4, 64))
    assert not plan.encodes("2.weight", torch.zeros(64, 64, dtype=torch.int64))
    assert not plan.encodes("2.weight", torch.zeros(64, 64, dtype=torch.float64))


def test_plans_that_say_nothing_or_not_enough_are_refused() -> None:
    with pytest.raises(ValueError, match="neither gradients nor weights"):
        Plan()
    with pytest.raises(TypeError, match="expected a codec"):
        Plan(gradients=BlockQuant)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_elements is -1"):
        Plan(gradients=BlockQuant(4), min_elements=-1)
    with pytest.raises(TypeError, match="min_elements is nan, expected an integer"):
        Plan(gradients=BlockQuant(4), min_elements=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a sequence"):
        Plan(gradients=BlockQuant(4), exclude="head.*")  # type: ignore[arg-type]
    for exclude in (None, (1, 2)):
        with pytest.raises(TypeError, match="expected names of parameters"):
            Plan(gradients=BlockQuant(4), exclude=exclude)  # type: ignore[arg-type]


@on_ranks(2)
def test_ddp_averages_what_is_not_encoded_exactly_and_says_so_once() -> None:
    x = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    plain = DDP(make_model())
    plain(x).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.module.named_parameters()}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ddp = DDP(make_model())
        state = State(Plan(gradients=TopK(0.05), exclude=("0.*",)), model=ddp.module)
        ddp.register_comm_hook(state, ddp_hook)
        for _ in range(2):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
    for name, parameter in ddp.module.named_parameters():
        if name == "2.weight":
            assert 0 < parameter.grad.count_nonzero() <= 0.1 * parameter.numel() + 2
        else:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-8)
    assert {name for name, *_ in state.residuals.segments()} == {"2.weight"}
    lines = [line for line in said.getvalue().splitlines() if "compression" in line]
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    if lines:
        assert "45.7%" in lines[0] and "0.weight, 1.weight, 1.bias, 2.bias, 3.weight" in lines[0], lines
