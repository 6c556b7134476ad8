"""Several backwards with one reduction: the same gradients as with one each, and fewer collectives."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.deepspeed.upstream.reference import ROWS, assert_same, engine_over, gradients, rows, weights
from tests.deepspeed.upstream.test_user_backward import WIDTH, Branches, Stack
from tests.sharding.ranks import STAGES, on_ranks, raises


def run_backwards(engine: Any, count: int, first: int = 0) -> None:
    for seed in range(first, first + count):
        engine.backward(
            engine(rows(ROWS, WIDTH, seed=seed).to(engine.module.first.weight.dtype)).float().square().mean()
        )


def calls(engine: Any) -> int:
    """Collectives that reduce gradients, so far."""
    import zeropg

    counted = zeropg.stats(engine._group)
    return sum(of["calls"] for name, of in counted.items() if name.startswith(("all_reduce", "reduce_scatter")))


@on_ranks(2, timeout=120)
def test_gradients_and_weights_are_those_of_backwards_one_by_one() -> None:
    for stage in STAGES:
        for model in (Stack, Branches):
            together, one_by_one = (engine_over(model(), stage, gradient_clipping=0.05) for _ in range(2))
            for step in range(3):
                with together.coalesce_grad_reduction():
                    run_backwards(together, 3, first=step)
                run_backwards(one_by_one, 3, first=step)
                assert_same(gradients(together), gradients(one_by_one))
                for engine in (together, one_by_one):
                    engine.step()
                    assert engine.was_step_applied()
                assert_same(weights(together), weights(one_by_one))
                torch.testing.assert_close(together.get_global_grad_norm(), one_by_one.get_global_grad_norm())


@on_ranks(2, timeout=120)
def test_one_backward_alone_is_reduced_too() -> None:
    for stage in STAGES:
        inside, plain = (engine_over(Stack(), stage) for _ in range(2))
        with inside.coalesce_grad_reduction():
            run_backwards(inside, 1)
        run_backwards(plain, 1)
        assert_same(gradients(inside), gradients(plain))


@on_ranks(2, timeout=120)
def test_there_are_fewer_collectives() -> None:
    for stage in (2, 3):
        engine = engine_over(Stack(), stage)
        counts = []
        for coalesces in (False, True):
            before = calls(engine)
            if coalesces:
                with engine.coalesce_grad_reduction():
                    run_backwards(engine, 4)
            else:
                run_backwards(engine, 4)
            counts.append(calls(engine) - before)
            engine.step()
        assert counts[1] * 4 <= counts[0], counts


@on_ranks(2, timeout=120)
def test_sixteen_bits_accumulation_and_state_on_a_disk() -> None:
    with tempfile.TemporaryDirectory(prefix="zeropg-engine-") as folder:
        disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        for stage in (1, 2, 3):
            zero = {"zero_optimization": {"stage": stage, **disk}}
            for more in ({"fp16": {"enabled": True, "loss_scale": 8}}, {"bf16": {"enabled": True}}, zero, {"gas": 2}):
                together, one_by_one = (engine_over(Stack(), stage, **more) for _ in range(2))
                for micro_batch in range(2):
                    with together.coalesce_grad_reduction():
                        run_backwards(together, 2, first=micro_batch)
                    run_backwards(one_by_one, 2, first=micro_batch)
                    for engine in (together, one_by_one):
                        engine.step()
                assert together.global_steps == one_by_one.global_steps
                assert_same(weights(together), weights(one_by_one), relative=1e-2 if "16" in str(more) else 1e-5)


@on_ranks(2, timeout=120)
def test_calls_that_do_not_belong_inside_are_refused_and_leave_no_trace() -> None:
    for stage in STAGES:
        engine = engine_over(Stack(), stage)
        with engine.coalesce_grad_reduction():
            with raises(RuntimeError, "step: called inside", "coalesce_grad_reduction"):
                engine.step()
            for nested in (engine.no_sync, engine.coalesce_grad_reduction):
                with raises(RuntimeError, "leave the inner one out"), nested():
                    pass
            run_backwards(engine, 1)
        with engine.no_sync(), raises(RuntimeError, "leave the inner one out"), engine.coalesce_grad_reduction():
            pass
        engine.step()
        assert engine.was_step_applied() and engine.is_gradient_accumulation_boundary()
        with raises(ValueError, "the program's own"), engine.coalesce_grad_reduction():
            run_backwards(engine, 1)
            raise ValueError("the program's own")
        engine.zero_grad()
        plain = engine_over(Stack(), stage)
        plain.module.load_state_dict(weights(engine))
        for one in (engine, plain):
            run_backwards(one, 1)
        assert_same(gradients(engine), gradients(plain))
