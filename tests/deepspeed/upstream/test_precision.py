"""16 bits: which dtypes there are, gradients beside DDP's, overflows that leave everything as it was, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.upstream.reference import ROWS, ddp_gradients, engine_over, gradients, rows, weights
from tests.deepspeed.upstream.test_user_backward import WIDTH, Stack
from tests.sharding.ranks import STAGES, on_ranks, raises


def set_gradients(engine: Any, value: float) -> None:
    """A backward whose gradient of each weight is about `value`, unscaled, on rank 1 alone."""
    x = torch.full((ROWS, WIDTH), 1.0)
    loss = engine(x).float().sum() * (value if dist.get_rank() == 1 else 0.0)
    engine.backward(loss)


@on_ranks(2, timeout=120)
def test_scales_move_as_overflows_come_and_leave_weights_alone() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}
    for stage in STAGES:
        for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
            zero = {"zero_optimization": {"stage": stage, **offload}}
            engine = engine_over(nn.Linear(WIDTH, WIDTH), stage, fp16=fp16, **zero)
            expected = 2.0**8
            for overflows in (True, True, True, False, False, False, True):
                before, rate = weights(engine), engine.skipped_steps
                set_gradients(engine, float("inf") if overflows else 1e-3)
                engine.step()
                is_same = all(torch.equal(value, before[name]) for name, value in weights(engine).items())
                assert is_same == overflows == engine.optimizer.overflow == (not engine.was_step_applied())
                assert engine.skipped_steps == rate + overflows
                if overflows:
                    expected /= 2
            assert engine.cur_scale == expected * 2, "two good steps after the first doubled it once"
            assert engine.global_steps == 7 and engine.skipped_steps == 4


@on_ranks(2, timeout=120)
def test_overflows_in_bf16_are_left_out_or_not_as_told() -> None:
    for stage in STAGES:
        for checks in (True, False):
            engine = engine_over(nn.Linear(WIDTH, WIDTH), stage, bf16={"enabled": True, "check_grad_overflow": checks})
            set_gradients(engine, float("inf"))
            engine.step()
            assert engine.was_step_applied() == (not checks)
            assert all(value.isfinite().all() for value in weights(engine).values()) == checks


@on_ranks(2, timeout=120)
def test_gradients_in_bf16_are_near_ddps() -> None:
    def backward(model: Any) -> None:
        model(rows(ROWS, WIDTH).bfloat16()).float().square().mean().backward()

    expected = ddp_gradients(Stack().bfloat16(), backward)
    for stage in STAGES:
        engine = engine_over(Stack(), stage, bf16={"enabled": True})
        backward(engine)
        found = gradients(engine)
        assert {value.dtype for value in found.values()} == {torch.float32}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value.float(), rtol=3e-2, atol=3e-3)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.arange(4) * 1.0001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@on_ranks(2, timeout=120)
def test_parameters_are_cast_and_buffers_only_if_told() -> None:
    for stage in STAGES:
        for block, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            kept = engine_over(Buffered(), stage, **{block: {"enabled": True}})
            assert kept.module.layer.weight.dtype == dtype and kept.module.angles.dtype == torch.float32
            assert torch.equal(kept.module.angles, torch.arange(4) * 1.0001)
            types = {"buffer_dtype": block}
            cast = engine_over(Buffered(), stage, data_types=types, **{block: {"enabled": True}})
            assert cast.module.angles.dtype == dtype
        whole = engine_over(Buffered(), stage)
        assert whole.module.layer.weight.dtype == torch.float32
    with raises(ValueError, "data_types.param_dtype is 'fp16'", "fp16 or bf16 says"):
        engine_over(Buffered(), 1, data_types={"param_dtype": "fp16"}, bf16={"enabled": True})


@on_ranks(2, timeout=120)
def test_clipping_is_to_one_unless_told_and_zero_leaves_it_out() -> None:
    from zeropg import deepspeed

    for stage in STAGES:
        for told, limit in ((None, 1.0), (0.5, 0.5), (0.0, float("inf"))):
            model = nn.Linear(WIDTH, WIDTH, bias=False)
            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": stage}}
            if told is not None:
                config["gradient_clipping"] = told
            made = torch.optim.SGD(model.parameters(), lr=1.0)
            engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)
            assert engine.gradient_clipping() == (1.0 if told is None else told)
            before = weights(engine)["weight"]
            engine.backward(100 * engine(rows(ROWS, WIDTH)).sum())
            engine.step()
            norm = float(engine.get_global_grad_norm())
            assert norm > 1
            moved = float((before - weights(engine)["weight"]).norm())
            assert moved == pytest.approx(min(norm, limit), rel=1e-4)


@on_ranks(2, timeout=120)
def test_a_static_scale_stays_and_gradients_are_gone_after_a_step() -> None:
    for stage in STAGES:
        engine = engine_over(Stack(), stage, fp16={"enabled": True, "loss_scale": 128})
        assert engine.loss_scale() == 128 == engine.cur_scale and not engine.dynamic_loss_scale()
        for _ in range(3):
            engine.backward(engine(rows(ROWS, WIDTH)).float().square().mean())
            engine.step()
            assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert engine.cur_scale == 128
