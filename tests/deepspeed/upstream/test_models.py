"""Models of any shape and path: outputs in containers, unused and unbalanced parameters, many small ones, repeats."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.upstream.reference import ROWS, assert_same, ddp_gradients, engine_over, gradients, rows, weights
from tests.deepspeed.upstream.test_user_backward import WIDTH, Stack, sum_of_squares
from tests.sharding.ranks import STAGES, on_ranks

Pair = namedtuple("Pair", ["hidden", "loss"])


class Returning(nn.Module):
    """Gives its outputs in a container of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self._kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        loss = self.second(hidden).square().mean()
        return {
            "dict": {"hidden": hidden, "loss": loss},
            "list": [hidden, loss],
            "namedtuple": Pair(hidden, loss),
            "nested": {"all": ([hidden], {"loss": loss}), "name": "x"},
            "tuple": (hidden, loss),
        }[self._kind]


def loss_in(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, dict) and "all" in outputs:
        return outputs["all"][1]["loss"]  # type: ignore[no-any-return]
    return outputs["loss"] if isinstance(outputs, dict) else outputs[1]  # type: ignore[no-any-return]


@on_ranks(2, timeout=120)
def test_outputs_come_in_containers_of_any_kind() -> None:
    for kind in ("dict", "list", "namedtuple", "nested", "tuple"):
        expected = ddp_gradients(Returning(kind), lambda model: loss_in(model(rows(ROWS, WIDTH))).backward())
        for stage in STAGES:
            engine = engine_over(Returning(kind), stage)
            outputs = engine(rows(ROWS, WIDTH))
            assert type(outputs) is type(Returning(kind)(rows(ROWS, WIDTH)))
            engine.backward(loss_in(outputs))
            assert_same(gradients(engine), expected)


class Paths(nn.Module):
    """Uses one of its layers, as told: of those that no rank takes there is no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, path: int) -> torch.Tensor:
        return self.layers[path](x)  # type: ignore[no-any-return]


@on_ranks(2, timeout=120)
def test_ranks_take_paths_of_their_own_and_layers_that_nobody_takes_stay() -> None:
    own = dist.get_rank()

    def backward(model: Any) -> None:
        model(rows(ROWS, WIDTH), own).square().mean().backward()

    expected = ddp_gradients(Paths(), backward, find_unused_parameters=True)
    for stage in STAGES:
        engine = engine_over(Paths(), stage)
        before = weights(engine)
        backward(engine)
        found = gradients(engine)
        assert {name[:8] for name in found} == {"layers.0", "layers.1"}
        assert_same(found, {name: expected[name] for name in found})
        engine.step()
        assert torch.equal(weights(engine)["layers.2.weight"], before["layers.2.weight"])
        for path in (0, 1, 2):  # the path changes from step to step, on all ranks alike
            engine.backward(engine(rows(ROWS, WIDTH), path).square().mean())
            engine.step()
            assert engine.was_step_applied()


@on_ranks(2, timeout=120)
def test_a_model_may_run_several_times_before_one_backward() -> None:
    def thrice(model: Any) -> None:
        losses = [model(rows(ROWS, WIDTH, seed=seed)).square().mean() for seed in range(3)]
        with torch.no_grad():
            model(rows(ROWS, WIDTH))
        torch.stack(losses).sum().backward()

    expected = ddp_gradients(Stack(), thrice)
    for stage in STAGES:
        engine = engine_over(Stack(), stage)
        thrice(engine)
        assert_same(gradients(engine), expected)


@on_ranks(2, timeout=120)
def test_evaluation_between_training_steps_changes_nothing() -> None:
    for stage in STAGES:
        switching, plain = (engine_over(Stack(), stage) for _ in range(2))
        for _ in range(3):
            switching.eval()
            with torch.no_grad():
                for seed in range(2):
                    switching(rows(ROWS, WIDTH, seed=seed))
            switching.train()
            for engine in (switching, plain):
                sum_of_squares(engine)
                engine.step()
        assert_same(weights(switching), weights(plain), relative=0)


class Many(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


@pytest.mark.parametrize("shape", [(60, 3), (2, 65)], ids=["many", "large"])
@on_ranks(3, timeout=120)
def test_many_small_layers_and_few_large_ones(shape: tuple[int, int]) -> None:
    backward = lambda model: model(rows(ROWS, shape[1])).square().mean().backward()  # noqa: E731
    expected = ddp_gradients(Many(*shape), backward)
    for stage in STAGES:
        engine = engine_over(Many(*shape), stage)
        backward(engine)
        assert_same(gradients(engine), expected)


@on_ranks(2, timeout=120)
def test_gradients_are_averaged_exactly() -> None:
    for stage in STAGES:
        model = nn.Linear(WIDTH, 1, bias=False)
        engine = engine_over(model, stage)
        x = torch.full((ROWS, WIDTH), float(dist.get_rank() + 1))  # its mean gradient is 1 and 2
        engine.backward(engine(x).mean())
        assert gradients(engine)["weight"].tolist() == [[1.5] * WIDTH]
        before = weights(engine)["weight"]
        engine.step()
        assert torch.equal(weights(engine)["weight"], before - 0.1 * 1.5)


@on_ranks(2, timeout=120)
def test_all_param_groups_count_the_same_steps_and_groups_may_be_empty() -> None:
    from zeropg import deepspeed

    for stage in STAGES:
        model = Stack()
        weights_of = [p for name, p in model.named_parameters() if name.endswith("weight")]
        groups = [{"params": weights_of, "weight_decay": 0.1}, {"params": []}]
        groups.append({"params": [p for name, p in model.named_parameters() if name.endswith("bias")]})
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        }
        engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        for step in range(1, 4):
            sum_of_squares(engine)
            engine.step()
            assert {int(state["step"]) for state in optimizer.state.values()} == {step}
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert weights(engine).keys() == dict(Stack().named_parameters()).keys()


@on_ranks(2, timeout=120)
def test_frozen_weights_stay_and_may_be_in_the_optimizer() -> None:
    from zeropg import deepspeed

    for stage in STAGES:
        model = Stack(freezes=True)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        before = weights(engine)
        for _ in range(2):
            sum_of_squares(engine)
            engine.step()
        changed = {name for name, value in weights(engine).items() if not torch.equal(value, before[name])}
        assert changed == {name for name in before if not name.startswith("middle")}
