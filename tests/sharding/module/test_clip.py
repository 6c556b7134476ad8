"""clip_grad_norm_: torch's numbers, the same bits on every rank and in every stage."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, close, equal, on_ranks, raises
from tests.small_gpt import SmallGPT, loss_of, make_batches, make_model

NORMS = (2.0, 1.0, 3.0, 0.5, math.inf)


def backward(stage: int, dtype: torch.dtype) -> SmallGPT:
    model = zeropg.fully_shard(make_model(dtype), stage=stage)
    batch = make_batches(1)[0]
    loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    with zeropg.full_gradients(model):
        return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@on_ranks(3)
def test_norm_and_clipped_gradients_are_torchs(dtype: torch.dtype) -> None:
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for norm_type in NORMS:
        plain = make_model(dtype)
        loss_of(plain, make_batches(1)[0]).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        bits = []
        for stage in STAGES:
            model = backward(stage, dtype)
            norm = zeropg.clip_grad_norm_(model, 0.1, norm_type)
            assert norm.dtype == dtype and norm.shape == () and close(norm, wanted, bound)
            clipped = gradients(model)
            assert all(close(a, p.grad, bound) for a, p in zip(clipped, plain.parameters(), strict=True))
            bits.append(torch.cat([norm.reshape(1), *(g.flatten() for g in clipped)]))
        everybodys = [torch.empty_like(bits[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, bits[0])
        assert all(equal(other, bits[0]) for other in everybodys + bits)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_small_gradients_are_left_alone(stage: int) -> None:
    model = backward(stage, torch.float32)
    before = gradients(model)
    norm = zeropg.clip_grad_norm_(model, 1e9)
    assert all(equal(a, b) for a, b in zip(before, gradients(model), strict=True))
    assert equal(zeropg.clip_grad_norm_(model, math.inf), norm)
    zeropg.clip_grad_norm_(model, 0.0)
    assert all(gradient.count_nonzero() == 0 for gradient in gradients(model))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_norms_that_are_not_finite(stage: int) -> None:
    for bad in (math.inf, math.nan):
        for norm_type in (2.0, math.inf):
            model = zeropg.fully_shard(make_model(), stage=stage)
            if dist.get_rank() == 1:  # one rank's fault is everybody's
                model.norm.weight.register_hook(lambda gradient, bad=bad: gradient * bad)
            loss_of(model, make_batches(1)[0]).backward()
            with raises(RuntimeError, "clip_grad_norm_", "error_if_nonfinite=False"):
                zeropg.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
            assert not math.isfinite(zeropg.clip_grad_norm_(model, 1.0, norm_type))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_nothing_to_clip(stage: int) -> None:
    model = zeropg.fully_shard(make_model(), stage=stage)
    assert zeropg.clip_grad_norm_(model, 1.0) == 0
    frozen = zeropg.fully_shard(nn.Linear(3, 3).requires_grad_(False), stage=stage)
    assert zeropg.clip_grad_norm_(frozen, 1.0) == 0


@on_ranks(2)
def test_wrong_arguments() -> None:
    model = backward(3, torch.float32)
    for max_norm in (-1.0, math.nan):
        with raises(ValueError, "max_norm"):
            zeropg.clip_grad_norm_(model, max_norm)
    for norm_type in (0.0, -2.0, math.nan):
        with raises(ValueError, "norm_type"):
            zeropg.clip_grad_norm_(model, 1.0, norm_type)
