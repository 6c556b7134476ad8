"""Adafactor, LAMB and Muon in one process, against torch and against their papers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.optim.fake_core import shard
from tests.sharding.optim.test_shard_optimizer import assert_same, fill_gradients, make_model
from zeropg.optim import LAMB, Adafactor, Muon
from zeropg.optim.peers import assign
from zeropg.optim.row_spans import sums_of_squares
from zeropg.optim.shard_optimizer import shard_optimizer


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


MUON: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "spectral_unclamped"},
]


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("options", MUON)
def test_muon_is_torchs_and_adamw_for_what_is_no_matrix(options: dict[str, Any], is_sharded: bool) -> None:
    plain = make_model(torch.float32)
    model = copy.deepcopy(plain)
    optimizer: torch.optim.Optimizer = Muon(model.parameters(), 3e-2, **options)
    if is_sharded:
        optimizer = shard_optimizer(optimizer, shard(model))
    try:
        peer = torch.optim.Muon(matrices(plain), 3e-2, **options)
    except ValueError as error:  # torch 2.11 knows fewer ways to scale
        pytest.skip(str(error))
    reference = [
        peer,
        torch.optim.AdamW(others(plain), 3e-2, weight_decay=options.get("weight_decay", 0.1)),
    ]
    for step in range(5):
        fill_gradients(plain, step)
        fill_gradients(model, step)
        optimizer.step()
        for each in reference:
            each.step()
    for mine, theirs in zip(matrices(model), matrices(plain), strict=True):
        assert mine.equal(theirs)
    assert_same(model, plain, relative=1e-6, of_largest=1e-6)


def test_torchs_muon_is_taken_beside_another_optimizer() -> None:
    plain = make_model(torch.float32)
    model = shard(copy.deepcopy(plain))
    with pytest.warns(UserWarning, match="unless another optimizer steps them"):
        optimizer = shard_optimizer(torch.optim.Muon(matrices(model), 3e-2), model)
    reference = torch.optim.Muon(matrices(plain), 3e-2)
    for step in range(3):
        fill_gradients(plain, step)
        fill_gradients(model, step)
        optimizer.step()
        reference.step()
    assert_same(model, plain, relative=0, of_largest=0)


def test_groups_say_who_goes_by_muon() -> None:
    plain = make_model()
    model = shard(copy.deepcopy(plain))
    groups = [{"params": model[0].parameters(), "use_muon": False, "lr": 1e-2}, {"params": model[2].parameters()}]
    optimizer = shard_optimizer(Muon([*groups, {"params": model[3].parameters()}], 3e-2), model)
    reference = torch.optim.AdamW(plain[0].parameters(), 1e-2, weight_decay=0.1)
    for step in range(3):
        fill_gradients(plain, step)
        fill_gradients(model, step)
        optimizer.step()
        reference.step()
    assert_same(model[0], plain[0])
    assert optimizer.state[model[2].weight].keys() == {"momentum_buffer"}
    assert optimizer.state[model[2].bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("correction", ["direction", "lr", None])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_lamb_is_the_papers_or_deepspeeds(is_sharded: bool, correction: Any, inside: bool) -> None:
    plain = make_model()
    model = copy.deepcopy(plain)
    given = {"weight_decay": 0.2, "bounds": (0.0, 3.0), "correction": correction, "eps_inside_sqrt": inside}
    eps = 0.1 if inside else 1e-6  # with a small one there is no difference
    optimizer: torch.optim.Optimizer = LAMB(model.parameters(), 0.1, (0.8, 0.9), eps, **given)
    if is_sharded:
        optimizer = shard_optimizer(optimizer, shard(model))
    first = {p: torch.zeros_like(p) for p in plain.parameters()}
    second = {p: torch.zeros_like(p) for p in plain.parameters()}
    for step in range(1, 5):
        fill_gradients(plain, step)
        fill_gradients(model, step)
        optimizer.step()
        with torch.no_grad():
            for p in plain.parameters():
                assert p.grad is not None
                first[p] = 0.8 * first[p] + 0.2 * p.grad
                second[p] = 0.9 * second[p] + 0.1 * p.grad**2
                biases = (1 - 0.8**step, 1 - 0.9**step)
                one, two = biases if correction == "direction" else (1.0, 1.0)
                variance = second[p] / two
                update = first[p] / one / ((variance + eps).sqrt() if inside else variance.sqrt() + eps) + 0.2 * p
                ratio = (p.norm() / update.norm()).clamp(0.0, 3.0) if p.any() else 1.0
                p -= 0.1 * ratio * update * (biases[1] ** 0.5 / biases[0] if correction == "lr" else 1.0)
    assert_same(model, plain, relative=1e-12, of_largest=1e-12)


class Stacks(nn.Module):
    """Parameters of 0 to 4 dimensions, also such whose row or column has the parameter's shape."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(), (7,), (1, 5), (5, 1), (6, 9), (3, 4, 5), (2, 3, 4, 5)]
        self.values = nn.ParameterList(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


ADAFACTOR: list[dict[str, Any]] = [
    {},
    {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-3, 0.5), "d": 1.5, "weight_decay": 0.1, "maximize": True},
    {"lr": torch.tensor(0.1, dtype=torch.float64), "eps": (0.0, 0.0), "foreach": True},
]


@pytest.mark.parametrize("make", [Adafactor, torch.optim.Adafactor])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("options", ADAFACTOR)
def test_adafactor_is_torchs(
    make: Any, is_sharded: bool, dtype: torch.dtype, tolerance: float, options: dict[str, Any]
) -> None:
    plain = Stacks(dtype)
    model = copy.deepcopy(plain)
    optimizer: torch.optim.Optimizer = make(model.parameters(), **options)
    if is_sharded:
        optimizer = shard_optimizer(optimizer, shard(model))
    elif make is not Adafactor:
        pytest.skip("is what is compared with")
    reference = torch.optim.Adafactor(plain.parameters(), **options)
    for step in range(8):
        for each in (plain, model):
            generator = torch.Generator().manual_seed(step)
            for parameter in each.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        optimizer.step()
        reference.step()
    assert_same(model, plain, relative=tolerance, of_largest=tolerance)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        for key, value in reference.state[theirs].items():
            kept = optimizer.state[mine][key]
            torch.testing.assert_close(kept.view(value.shape), value, rtol=10 * tolerance, atol=tolerance)


def test_sums_over_rows_and_columns_of_any_cut_add_up() -> None:
    values = torch.randn(3, 4, 5, dtype=torch.float64)
    squares = values.square()
    for first in range(0, 61, 7):
        for second in range(first, 61):
            rows, columns = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
            for start, stop in ((0, first), (first, second), (second, 60)):
                found = sums_of_squares(values.view(-1)[start:stop], start, values.shape)
                rows += found[0]
                columns += found[1]
            torch.testing.assert_close(rows, squares.sum(2))
            torch.testing.assert_close(columns, squares.sum(1))


def test_work_is_dealt_out_by_cost() -> None:
    assert assign([1, 5, 2, 3, 3], 2) == [[1, 2], [3, 4, 0]]
    assert assign([], 2) == [[], []]
    assert assign([1.0], 3) == [[0], [], []]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Muon(p, lr=-1.0), "Muon: lr -1"),
        (lambda p: Muon(p, betas=(0.9, 1.0)), "betas in"),
        (lambda p: Muon(p, adjust_lr_fn="none"), "expected None, or one of original"),
        (lambda p: Muon(p, ns_dtype=torch.float32), "expected one of bfloat16, float32"),
        (lambda p: Muon(p, use_muon=True), r"use_muon=True has parameters of shapes \[\[17\]"),
        (lambda p: Adafactor(p, lr=-1.0), "Adafactor: lr -1"),
        (lambda p: Adafactor(p, eps=(None, -1.0)), "eps .None or >= 0, >= 0., beta2_decay"),
        (lambda p: Adafactor(p, d=0.5), "d >= 1"),
        (lambda p: LAMB(p, lr=-1.0), "LAMB: lr -1"),
        (lambda p: LAMB(p, bounds=(2.0, 1.0)), "0 <= least <= most"),
        (lambda p: LAMB(p, correction="none"), "correction is 'none'; expected 'direction', 'lr' or None"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(make_model().parameters())


def test_state_of_another_class_is_refused() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(LAMB(model.parameters()), model)
    state = {0: {"step": torch.tensor(1.0), "momentum_buffer": torch.zeros(17, 9)}}
    groups = [{"params": list(range(len(list(model.parameters()))))}]
    with pytest.raises(ValueError, match=r"has 'momentum_buffer', but LambRule keeps \['exp_avg', 'exp_avg_sq'\]"):
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def test_factors_of_another_shape_are_refused() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(Adafactor(model.parameters()), model)
    groups = [{"params": list(range(len(list(model.parameters()))))}]
    state = {0: {"step": torch.tensor(1.0), "row_var": torch.zeros(9, 1), "col_var": torch.zeros(1, 9)}}
    with pytest.raises(ValueError, match=r"'row_var' of shape \[9, 1\], .* keeps one of shape \[17, 1\]"):
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    other = shard_optimizer(LAMB(model.parameters()), model)
    state[0].pop("row_var")
    with pytest.raises(ValueError, match=r"'col_var' of shape \[1, 9\], but LambRule keeps none"):
        other.load_state_dict({"state": state, "param_groups": groups})
