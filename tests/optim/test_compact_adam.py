"""zeropg.optim.Adam and AdamW by themselves: moments in 32, 16 and 8 bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from zeropg.optim import Adam, AdamW
from zeropg.optim.kernels import kernels_for

BITS = (32, 16, 8)
every_bits = pytest.mark.parametrize("bits", BITS)
compact = pytest.mark.parametrize("bits", (16, 8))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(37, 65), nn.Tanh(), nn.Linear(65, 3))


def gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(make: Any, seed: int, steps: int = 300) -> float:
    """Returns the mean loss of the last steps of a small regression with noise, other data for each seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    target = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16)
        loss = (model(x) - target(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50


def test_32_bits_are_torchs() -> None:
    for ours, theirs in ((Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)):
        model, reference = make_model(), make_model()
        options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": True}
        optimizer, other = ours(model.parameters(), **options), theirs(reference.parameters(), **options)
        for step in range(20):
            gradients(list(model.parameters()), step)
            gradients(list(reference.parameters()), step)
            optimizer.step()
            other.step()
        for left, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert AdamW([nn.Parameter(torch.zeros(1))]).defaults["weight_decay"] == 0.01


@compact
def test_training_ends_where_32_bits_end_within_the_noise_of_seeds(bits: int) -> None:
    seeds = range(4)
    whole = [train(lambda p: torch.optim.AdamW(p, lr=3e-3), seed) for seed in seeds]
    few = [train(lambda p: AdamW(p, lr=3e-3, state_bits=bits), seed) for seed in seeds]
    ratios = [math.log(a / b) for a, b in zip(few, whole, strict=True)]
    assert abs(sum(ratios) / len(ratios)) < 0.05, (few, whole)


@compact
def test_second_moments_follow_what_rounding_to_the_nearest_would_freeze(bits: int) -> None:
    parameter = nn.Parameter(torch.randn(4096))
    optimizer = AdamW([parameter], lr=1e-4, betas=(0.9, 0.999), state_bits=bits)
    for step in range(1500):
        parameter.grad = torch.full_like(parameter, 1.0 if step < 500 else 0.1)
        optimizer.step()
    expected = 0.01 * (1 - 0.999**1500) + (1.0 - 0.01) * (1 - 0.999**500) * 0.999**1000
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"].double()
    assert second.mean().item() == pytest.approx(expected, rel=0.02)
    assert second.std().item() < 0.4 * expected


@every_bits
def test_state_dict_has_torchs_layout_and_loads_into_any_bits_and_torch(bits: int) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, state_bits=bits)
    for step in range(5):
        gradients(list(model.parameters()), step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["state_bits"] == bits
    for entries, parameter in zip(saved["state"].values(), model.parameters(), strict=True):
        assert {key: (value.dtype, value.shape) for key, value in entries.items() if key != "step"} == dict.fromkeys(
            ("exp_avg", "exp_avg_sq"), (torch.float32 if bits == 32 else torch.bfloat16, parameter.shape)
        )
        assert entries["step"] == 5
    for others in BITS:
        other = AdamW(model.parameters(), state_bits=others)
        other.load_state_dict(saved)
        assert (other.param_groups[0]["state_bits"], other.param_groups[0]["lr"]) == (others, 1e-2)
        again = other.state_dict()["state"]
        for index, entries in saved["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                bound = 0.0 if others >= bits else {16: 2**-8, 8: 2**-4}[others]
                torch.testing.assert_close(
                    again[index][key].float(), entries[key].float(), rtol=bound, atol=1e-5 if others == 8 else 0
                )
    torchs = torch.optim.AdamW(model.parameters())
    torchs.load_state_dict(saved)
    torchs.step()
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["state_bits"] == bits
    optimizer.step()


@compact
def test_training_goes_on_from_a_state_dict_bit_for_bit(bits: int) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, state_bits=bits)
    other, resumed = make_model(), None
    for step in range(8):
        if step == 4:
            other.load_state_dict(model.state_dict())
            resumed = AdamW(other.parameters(), state_bits=bits)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, steps in ((model, optimizer), (other, resumed)):
            if steps is not None:
                gradients(list(one.parameters()), step)
                steps.step()
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_state_takes_the_bytes_that_it_should() -> None:
    for bits, each in ((32, 8), (16, 4), (8, 2 + 2 / 32)):
        parameter = nn.Parameter(torch.randn(64, 32))
        optimizer = AdamW([parameter], state_bits=bits)
        parameter.grad = torch.randn(64, 32)
        optimizer.step()
        held = sum(value.nbytes for key, value in optimizer.state[parameter].items() if key != "step")
        assert held == each * parameter.numel()


def test_groups_may_differ_and_state_bits_may_change() -> None:
    model = make_model()
    first, *rest = model.parameters()
    optimizer = AdamW([{"params": [first], "state_bits": 8}, {"params": rest}], lr=1e-2)
    gradients([first, *rest], 0)
    optimizer.step()
    assert [optimizer.state[p]["exp_avg"].dtype for p in (first, *rest)] == [torch.uint8] + [torch.float32] * 3
    before = optimizer.state_dict()["state"][0]["exp_avg"].float()
    optimizer.param_groups[0]["state_bits"] = 32
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)
    optimizer.step()
    assert optimizer.state[first]["exp_avg"].equal(first.grad) and not before.equal(first.grad)


@compact
def test_16_bit_and_strided_parameters_and_gradients(bits: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parameter = nn.Parameter(torch.randn(6, 40, dtype=dtype).t())
        expected = parameter.detach().float()
        optimizer = AdamW([parameter], lr=0.1, weight_decay=0, state_bits=bits)
        parameter.grad = torch.randn(40, 6, dtype=dtype)
        optimizer.step()
        expected -= 0.1 * parameter.grad.float().sign()
        torch.testing.assert_close(parameter.float(), expected, rtol=2**-7, atol=2e-3)


@every_bits
def test_zeros_tiny_and_huge_gradients(bits: int) -> None:
    parameter = nn.Parameter(torch.ones(200))
    optimizer = AdamW([parameter], lr=1e-2, eps=1e-30, weight_decay=0, state_bits=bits)
    gradient = torch.zeros(200)
    gradient[32:64] = 1e-12
    gradient[64:96] = 1e-25  # its square is 0 in float32
    gradient[96:128] = 1e15
    gradient[128:160] = torch.tensor([1e3, 1e-1]).repeat(16)  # 27 octaves apart in the second moment
    gradient[160:199] = 1e30  # its square is infinite
    for _ in range(3):
        parameter.grad = gradient.clone()
        optimizer.step()
    moved = 1 - parameter.detach()
    assert moved.isfinite().all()
    assert not moved[:32].any()
    for part in (moved[32:64], moved[96:128], moved[128:160]):
        torch.testing.assert_close(part, torch.full_like(part, 3e-2), rtol=0.3, atol=0)
    assert not moved[160:].any()


@every_bits
def test_a_nan_shows_in_the_parameter(bits: int) -> None:
    parameter = nn.Parameter(torch.ones(64))
    optimizer = AdamW([parameter], state_bits=bits)
    parameter.grad = torch.ones(64)
    parameter.grad[3] = torch.nan
    parameter.grad[40] = torch.inf
    optimizer.step()
    assert parameter[3].isnan() and parameter[40].isnan()
    assert parameter.detach().isnan().sum() == 2


def test_what_it_cannot_do_it_says() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    for options, words in (
        ({"state_bits": 4}, "state_bits is 4, expected 32, 16 or 8"),
        ({"state_bits": 8, "betas": (0.9, 1.0)}, r"betas in \[0, 1\)"),
        ({"lr": -1.0}, "lr, eps, weight_decay >= 0"),
    ):
        with pytest.raises(ValueError, match=words):
            AdamW([parameter], **options)
    with pytest.raises(ValueError, match=r"amsgrad is not available; use torch.optim.Adam"):
        Adam([{"params": [parameter], "amsgrad": True}])
    parameter.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"eps is 0, expected at least 1.2e-38 with state in 8 bits"):
        AdamW([parameter], eps=0.0, state_bits=8).step()
    double = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    with pytest.raises(TypeError, match=r"float64, and its param group says state_bits=16; use 32"):
        AdamW([double], state_bits=16).step()
    AdamW([double]).step()
    elsewhere = nn.Parameter(torch.zeros(3, device="meta"))
    elsewhere.grad = torch.zeros(3, device="meta")
    with pytest.raises(NotImplementedError, match=r"on meta; expected plain tensors on the CPU"):
        AdamW([elsewhere]).step()
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradient"):
        AdamW(table.parameters()).step()
    imaginary = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    imaginary.grad = torch.zeros_like(imaginary)
    with pytest.raises(TypeError, match=r"complex64, expected a floating dtype"):
        AdamW([imaginary]).step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_load_keeps_moments_of_16_bit_parameters(dtype: torch.dtype, bits: int) -> None:
    parameter = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = AdamW([parameter], lr=1e-3, state_bits=bits)
    parameter.grad = torch.full_like(parameter, 2.0**-17)  # whose square fp16 does not have
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = {key: value.clone() for key, value in saved["state"][0].items()}
    again = AdamW([nn.Parameter(torch.ones(64, dtype=dtype))], lr=1e-3, state_bits=bits)
    saved["state"][0]["step"] = 1  # a number, as state dicts of old have it
    again.load_state_dict(saved)
    after = again.state_dict()["state"][0]
    assert after["exp_avg_sq"].min() > 0
    assert all(torch.equal(after[key].float(), before[key].float()) for key in before)
    again.param_groups[0]["params"][0].grad = torch.full_like(parameter, 2.0**-17)
    again.step()


def test_another_classs_option_in_a_group_chooses_no_kernel() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(8))], "state_bits": 8, "decoupled_weight_decay": True}]
    optimizer = torch.optim.Adam(groups)
    kernels = kernels_for(optimizer)
    assert kernels is not None and kernels.of(optimizer.param_groups[0]).torch_flags["decoupled_weight_decay"] == 1
