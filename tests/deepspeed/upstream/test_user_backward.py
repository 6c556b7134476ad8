"""Gradients of backwards that the program runs are DDP's: scalars and not, several, checkpointed, with frozen parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.deepspeed.upstream.reference import (
    ROWS,
    assert_same,
    ddp_gradients,
    engine_over,
    gradients,
    rows,
    weights,
)
from tests.sharding.ranks import STAGES, on_ranks, raises

WIDTH = 8


class Stack(nn.Module):
    """Two blocks, of which each may be checkpointed, and a frozen layer before the last one."""

    def __init__(self, *, reentrant: bool | None = None, freezes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.middle.requires_grad_(not freezes)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.middle):
            x = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
        return self.last(x)  # type: ignore[no-any-return]


def sum_of_squares(model: Any) -> None:
    model(rows(ROWS, WIDTH)).square().mean().backward()


def not_scalar(model: Any) -> None:
    model(rows(ROWS, WIDTH)).backward(gradient=rows(ROWS, WIDTH, seed=1))


def separate_loss(model: Any) -> None:
    nn.functional.mse_loss(model(rows(ROWS, WIDTH)), rows(ROWS, WIDTH, seed=2)).backward()


@on_ranks(2, timeout=120)
def test_losses_of_any_kind_have_ddps_gradients_and_weights() -> None:
    for backward in (sum_of_squares, not_scalar, separate_loss):
        expected = ddp_gradients(Stack(), backward)
        for stage in STAGES:
            engine = engine_over(Stack(), stage)
            before = weights(engine)
            backward(engine)
            assert_same(gradients(engine), expected)
            engine.step()
            after = weights(engine)
            assert_same(after, {n: v - 0.1 * expected[n] for n, v in before.items()})


@on_ranks(2, timeout=120)
def test_checkpointed_blocks_have_the_gradients_of_plain_ones() -> None:
    for backward in (sum_of_squares, not_scalar):
        expected = ddp_gradients(Stack(), backward)
        for stage in STAGES:
            for reentrant in (False, True):
                engine = engine_over(Stack(reentrant=reentrant), stage)
                for _ in range(2):  # a second time: nothing is left of the first
                    backward(engine)
                    assert_same(gradients(engine), expected)
                    engine.zero_grad()


@on_ranks(2, timeout=120)
def test_frozen_layers_under_checkpoints_leave_the_others_gradients_alone() -> None:
    expected = ddp_gradients(Stack(freezes=True), sum_of_squares)
    assert not any(name.startswith("middle") for name in expected)
    for stage in STAGES:
        for reentrant in (False, True):
            for precision in ({}, {"bf16": {"enabled": True}}):
                engine = engine_over(Stack(reentrant=reentrant, freezes=True), stage, **precision)
                frozen = weights(engine)["middle.weight"]
                sum_of_squares(engine)
                found = gradients(engine)
                assert found.keys() == expected.keys()
                if not precision:
                    assert_same(found, expected)
                engine.step()
                assert torch.equal(weights(engine)["middle.weight"], frozen)


class Lora(nn.Module):
    """A frozen layer with a low-rank path beside it, in checkpointed blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant:
            x.requires_grad_()  # as enable_input_require_grads does
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            run = lambda x, base=base, down=down, up=up: torch.tanh(base(x) + up(down(x)))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=self._reentrant)
        return x


@on_ranks(2, timeout=120)
def test_low_rank_paths_beside_frozen_layers_accumulate() -> None:
    def twice(model: Any) -> None:
        for seed in range(2):
            model(rows(ROWS, WIDTH, seed=seed)).square().mean().backward()

    for reentrant in (False, True):
        expected = ddp_gradients(Lora(reentrant), twice)
        for stage in STAGES:
            engine = engine_over(Lora(reentrant), stage)
            twice(engine)
            assert_same(gradients(engine), expected)


class Branches(nn.Module):
    """A leaf module with several outputs and inputs, of which one has no gradient."""

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(WIDTH, WIDTH)
            self.right = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self.left(x), {"right": self.right(x * mask)}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.leaf = self.Leaf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, others = self.leaf(self.first(x), (x > 0).float())
        return left + others["right"]


@on_ranks(2, timeout=120)
def test_leaf_modules_with_several_outputs_have_ddps_gradients() -> None:
    from zeropg.deepspeed.utils import set_z3_leaf_modules

    for backward in (sum_of_squares, not_scalar):
        expected = ddp_gradients(Branches(), backward)
        for stage in STAGES:
            model = Branches()
            set_z3_leaf_modules(model, [Branches.Leaf])
            engine = engine_over(model, stage)
            backward(engine)
            assert_same(gradients(engine), expected)


@on_ranks(2, timeout=120)
def test_scale_is_what_the_engines_own_backward_does() -> None:
    fp16 = {"enabled": True, "loss_scale": 8}
    for stage in STAGES:
        for gas in (1, 2):
            by_engine, by_hand = (engine_over(Stack(), stage, gas=gas, fp16=fp16) for _ in range(2))
            for seed in range(gas):
                x = rows(ROWS, WIDTH, seed=seed).half()
                by_engine.backward(by_engine(x).float().square().mean())
                by_hand.scale(by_hand(x).float().square().mean()).backward()
                for engine in (by_engine, by_hand):
                    engine.step()
            assert by_engine.was_step_applied() and by_hand.was_step_applied()
            assert_same(weights(by_hand), weights(by_engine), relative=1e-3)
        with raises(ValueError, "expected a scalar tensor"):
            by_hand.scale(by_hand(x))


@on_ranks(2, timeout=120)
def test_a_loss_that_is_divided_already_is_not_divided_again() -> None:
    for stage in STAGES:
        divided, undivided = (engine_over(Stack(), stage, gas=2) for _ in range(2))
        for seed in range(2):
            x = rows(ROWS, WIDTH, seed=seed)
            divided.backward(divided(x).square().mean() / 2, scale_wrt_gas=False)
            undivided.backward(undivided(x).square().mean())
            for engine in (divided, undivided):
                engine.step()
        assert_same(weights(divided), weights(undivided))


@on_ranks(2, timeout=120)
def test_each_step_of_unmanaged_accumulation_updates_from_any_number_of_backwards() -> None:
    data = [rows(ROWS, WIDTH, seed=seed) for seed in range(5)]
    for stage in STAGES:
        managed = engine_over(Stack(), stage, gas=2)
        unmanaged = engine_over(Stack(), stage, gas=2, managed_gradient_accumulation=False)
        for first in (0, 2):
            for x in data[first : first + 2]:
                managed.backward(managed(x).square().mean())
                managed.step()
                unmanaged.backward(unmanaged(x).square().mean())
            assert unmanaged.global_steps == managed.global_steps - 1
            unmanaged.step()
            assert unmanaged.was_step_applied() and unmanaged.global_steps == managed.global_steps
            assert_same(weights(unmanaged), weights(managed))
        unmanaged.backward(unmanaged(data[4]).square().mean())  # one backward alone
        unmanaged.step()
        assert unmanaged.was_step_applied() and unmanaged.global_steps == 3
        with raises(RuntimeError, "managed_gradient_accumulation=false"):
            unmanaged.set_gradient_accumulation_boundary(False)
