"""torch.func, torch.autocast and hooks over an engine: as over a plain model, and nothing is left behind."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from tests.deepspeed.upstream.reference import ROWS, assert_same, ddp_gradients, engine_over, gradients, rows
from tests.deepspeed.upstream.test_user_backward import WIDTH, Stack, sum_of_squares
from tests.sharding.ranks import STAGES, on_ranks, raises


@on_ranks(2, timeout=120)
def test_functional_transforms_of_inputs_go_through_an_engine() -> None:
    plain = Stack()
    x = rows(ROWS, WIDTH)

    def loss_of(model: Any, row: torch.Tensor) -> torch.Tensor:
        return model(row).square().sum()  # type: ignore[no-any-return]

    expected = {
        "grad": torch.func.grad(lambda row: loss_of(plain, row))(x[0]),
        "grad_and_value": torch.func.grad_and_value(lambda row: loss_of(plain, row))(x[0])[0],
        "jacrev": torch.func.jacrev(plain)(x[0]),
        "vmap": torch.func.vmap(torch.func.grad(lambda row: loss_of(plain, row)))(x),
    }
    for stage in STAGES:
        engine = engine_over(Stack(), stage, gas=2)
        found = {
            "grad": torch.func.grad(lambda row, e=engine: loss_of(e, row))(x[0]),
            "grad_and_value": torch.func.grad_and_value(lambda row, e=engine: loss_of(e, row))(x[0])[0],
            "jacrev": torch.func.jacrev(engine)(x[0]),
            "vmap": torch.func.vmap(torch.func.grad(lambda row, e=engine: loss_of(e, row)))(x),
        }
        assert_same(found, expected)  # not divided by the accumulation steps
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        assert engine.was_step_applied()


@on_ranks(2, timeout=120)
def test_autocast_has_ddps_gradients() -> None:
    def backward(model: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(rows(ROWS, WIDTH))
            assert output.dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                loss = output.float().square().mean()
        loss.backward()

    for reentrant in (None, False):
        expected = ddp_gradients(Stack(reentrant=reentrant), backward)
        for stage in STAGES:
            engine = engine_over(Stack(reentrant=reentrant), stage)
            backward(engine)
            assert_same(gradients(engine), expected)


@on_ranks(2, timeout=120)
def test_autocast_of_the_configuration_is_that_of_the_program() -> None:
    block = {"torch_autocast": {"enabled": True}}

    def backward(model: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(rows(ROWS, WIDTH))
        output.float().square().mean().backward()

    for reentrant in (None, False, True):
        expected = ddp_gradients(Stack(reentrant=reentrant), backward)
        for stage in STAGES:
            engine = engine_over(Stack(reentrant=reentrant), stage, **block)
            output = engine(rows(ROWS, WIDTH))
            assert output.dtype == torch.bfloat16 and engine.module.first.weight.dtype == torch.float32
            engine.backward(output.float().square().mean())
            assert_same(gradients(engine), expected)
            assert not torch.is_autocast_enabled("cpu")
            engine.step()
    engine = engine_over(Stack(), 1, torch_autocast={"enabled": True, "dtype": "bf16"}, bf16={"enabled": True})
    engine.backward(engine(rows(ROWS, WIDTH)).float().square().mean())
    engine.step()
    assert engine.torch_autocast_dtype() == torch.bfloat16
    with raises(ValueError, "torch_autocast.dtype", "needs a scaled loss"):
        engine_over(Stack(), 1, torch_autocast={"enabled": True, "dtype": "float16"})
    with raises(ValueError, "fp16.enabled and torch_autocast.enabled are both true"):
        engine_over(Stack(), 1, fp16={"enabled": True}, **block)


@on_ranks(2, timeout=120)
def test_a_plain_linear_of_one_row_has_its_gradient() -> None:
    for stage in STAGES:
        engine = engine_over(nn.Linear(WIDTH, WIDTH), stage)
        x = rows(WIDTH)  # without a batch
        expected = ddp_gradients(engine_copy(engine), lambda model, x=x: model(x).square().mean().backward())
        engine(x).square().mean().backward()
        assert_same(gradients(engine), expected)
        engine.step()


def engine_copy(engine: Any) -> nn.Module:
    from tests.deepspeed.upstream.reference import weights

    plain = nn.Linear(WIDTH, WIDTH)
    plain.load_state_dict(weights(engine))
    return plain


@on_ranks(2, timeout=120)
def test_hooks_do_not_pile_up() -> None:
    def hooks(engine: Any) -> int:
        modules = list(engine.module.modules())
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return sum(len(getattr(module, kind)) for module in modules for kind in kinds)

    for stage in STAGES:
        engine = engine_over(Stack(reentrant=False), stage)
        counts = []
        for _ in range(3):
            sum_of_squares(engine)
            engine.step()
            gc.collect()
            of_parameters = sum(len(p._backward_hooks or {}) for p in engine.module.parameters())
            counts.append((hooks(engine), of_parameters, len(gc.get_objects())))
        assert counts[1][:2] == counts[2][:2]
        assert counts[2][2] <= counts[1][2] + 50, "objects"


class Failing(nn.Module):
    """A checkpointed block that raises while it is computed again, if told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(self.run, block, x, use_reentrant=False)
        return x

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.fails and block is self.blocks[1]:
            raise ValueError("out of luck")
        return torch.tanh(block(x))


@on_ranks(2, timeout=120)
def test_a_recomputation_that_raises_leaves_no_trace() -> None:
    expected = ddp_gradients(Failing(), sum_of_squares)
    for stage in STAGES:
        engine = engine_over(Failing(), stage)
        loss = engine(rows(ROWS, WIDTH)).square().mean()
        engine.module.fails = True
        try:
            engine.backward(loss)
        except ValueError as error:
            assert "out of luck" in str(error)
        else:
            raise AssertionError("the block did not raise")
        engine.module.fails = False
        engine.zero_grad()
        sum_of_squares(engine)
        assert_same(gradients(engine), expected)
        engine.step()
        assert engine.was_step_applied()
        if stage == 3:  # nothing is left whole, where it is a copy
            assert engine.module._zeropg.memory_report()["gathered"] == 0
