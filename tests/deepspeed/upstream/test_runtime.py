"""What goes around training: optimizers and schedulers of any origin, no_sync, fragments, several engines, disks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.training import shared_folder
from tests.deepspeed.upstream.reference import ROWS, assert_same, engine_over, gradients, rows, weights
from tests.deepspeed.upstream.test_checkpoints import adam_over, states, step
from tests.deepspeed.upstream.test_user_backward import WIDTH, Stack, sum_of_squares
from tests.sharding.ranks import STAGES, on_ranks, raises


@on_ranks(2, timeout=120)
def test_optimizers_and_schedulers_are_objects_functions_or_configured() -> None:
    from zeropg import deepspeed

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.9**count)

    kinds = {
        None: lambda _: None,
        "object": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "function": lambda _: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    }
    for optimizer_kind, make in kinds.items():
        for scheduler_kind in (None, "object", "function", "configured"):
            if scheduler_kind == "object" and optimizer_kind != "object":
                continue
            model = Stack()
            optimizer = make(model)
            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 2}}
            if optimizer_kind is None:
                config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
            if scheduler_kind == "configured":
                config["scheduler"] = {"type": "WarmupLR", "params": {}}
            scheduler = schedule(optimizer) if scheduler_kind == "object" else None
            scheduler = schedule if scheduler_kind == "function" else scheduler
            engine, ours, _, found = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                model_parameters=model.parameters(),
                lr_scheduler=scheduler,
                config=config,
            )
            assert (found is None) == (scheduler_kind is None) and found is engine.lr_scheduler
            assert isinstance(ours.optimizer, torch.optim.AdamW)
            rates = []
            for _ in range(2):
                step(engine)
                rates.append(engine.get_lr()[0])
            if scheduler is not None:
                assert rates == pytest.approx([0.9e-3, 0.81e-3])


@on_ranks(2, timeout=120)
def test_no_sync_adds_up_in_every_stage_and_any_number_of_contexts() -> None:
    for stage in STAGES:
        held, plain = (engine_over(Stack(), stage) for _ in range(2))
        for seed in range(2):
            with held.no_sync():
                held.backward(held(rows(ROWS, WIDTH, seed=seed)).square().mean())
        held.backward(held(rows(ROWS, WIDTH, seed=2)).square().mean())
        for seed in range(3):
            plain.backward(plain(rows(ROWS, WIDTH, seed=seed)).square().mean())
        assert_same(gradients(held), gradients(plain))
        with held.no_sync():
            with raises(RuntimeError, "leave the inner one out"), held.no_sync():
                pass
            with raises(RuntimeError, "step: called inside"):
                held.step()
        held.step()
        assert held.was_step_applied()


@on_ranks(2, timeout=120)
def test_fragments_are_read_and_written_whole_and_in_parts() -> None:
    from zeropg.deepspeed import utils

    with tempfile.TemporaryDirectory(prefix="zeropg-engine-") as folder:
        places = ({}, {"device": "cpu"}, {"device": "nvme", "nvme_path": folder})
        for stage in (1, 2, 3):
            for place in places:
                for precision in ({}, {"bf16": {"enabled": True}}):
                    zero = {"offload_optimizer": place} if place else {}
                    engine = adam_over(Stack(freezes=True), stage, zero=zero, **precision)
                    engine.backward(engine(rows(ROWS, WIDTH)).float().square().mean())
                    for name, parameter in engine.module.named_parameters():
                        gradient = utils.safe_get_full_grad(parameter)
                        assert (gradient is None) == name.startswith("middle")
                        if gradient is not None:
                            assert gradient.shape == parameter.shape and gradient.abs().sum() > 0
                            utils.safe_set_full_grad(parameter, torch.full_like(gradient, 0.25))
                            assert (utils.safe_get_full_grad(parameter) == 0.25).all()
                    engine.step()
                    first = engine.module.first.weight
                    moment = utils.safe_get_full_optimizer_state(first, "exp_avg")
                    torch.testing.assert_close(moment, torch.full_like(moment, moment.flatten()[0].item()))
                    value = torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) / 7
                    utils.safe_set_full_fp32_param(first, value)
                    assert torch.equal(utils.safe_get_full_fp32_param(first), value)
                    local = utils.safe_get_local_fp32_param(first)
                    utils.safe_set_local_fp32_param(first, local * 2)
                    assert torch.equal(utils.safe_get_full_fp32_param(first), value * 2)
                    if place.get("device") != "nvme":
                        utils.safe_set_full_optimizer_state(first, value, "exp_avg_sq")
                        assert torch.equal(utils.safe_get_full_optimizer_state(first, "exp_avg_sq"), value)
                        part = utils.safe_get_local_optimizer_state(first, "exp_avg_sq")
                        utils.safe_set_local_optimizer_state(first, part + 1, "exp_avg_sq")
                        assert torch.equal(utils.safe_get_full_optimizer_state(first, "exp_avg_sq"), value + 1)


@on_ranks(2, timeout=120)
def test_gradients_are_updated_together() -> None:
    from zeropg.deepspeed.utils import safe_update_full_grad_vectorized

    for stage in STAGES:
        engine = engine_over(Stack(freezes=True), stage, gas=2)
        for seed in range(2):  # the program's own backwards: not divided yet
            engine(rows(ROWS, WIDTH, seed=seed)).square().mean().backward()
            if seed == 0:
                engine.step()
        before = gradients(engine)
        named = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        asked = []

        def double(gradient: torch.Tensor, parameter: nn.Parameter, asked: Any = asked, named: Any = named) -> Any:
            asked.append(named[id(parameter)])
            return 2 * gradient

        safe_update_full_grad_vectorized(list(engine.module.parameters()), double)
        assert asked == list(before)
        assert_same(gradients(engine), {name: 2 * value for name, value in before.items()})
        with raises(ValueError, "expected [8, 8]"):
            safe_update_full_grad_vectorized([engine.module.first.weight], lambda gradient, _: gradient[0])
        engine.step()
        assert engine.was_step_applied()


@on_ranks(2, timeout=120)
def test_small_helpers_say_where_a_rank_stands() -> None:
    import logging

    from zeropg import deepspeed

    rank = dist.get_rank()
    assert deepspeed.comm.get_local_rank() == rank and deepspeed.comm.get_all_ranks_from_group() == [0, 1]
    assert deepspeed.comm.get_world_group() is dist.group.WORLD
    accelerator = deepspeed.get_accelerator()
    accelerator.reset_peak_memory_stats()
    accelerator.manual_seed_all(1)
    assert accelerator.is_bf16_supported() and accelerator.memory_allocated() <= accelerator.max_memory_allocated()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.logger.addHandler(handler)
    try:
        for ranks in (None, [1], [-1]):
            deepspeed.log_dist(f"to {ranks}", ranks, logging.WARNING)
        for _ in range(2):
            deepspeed.utils.log_dist_once("once", [-1], logging.WARNING)
    finally:
        deepspeed.logger.removeHandler(handler)
    expected = [["to None", "to [-1]", "once"], ["to [1]", "to [-1]", "once"]][rank]
    assert said == [f"[zeropg rank {rank}] {text}" for text in expected]


@on_ranks(2, timeout=120)
def test_engines_side_by_side_have_losses_of_their_own_or_one_together() -> None:
    for stage in STAGES:
        for shares in (False, True):
            engines = [engine_over(Stack(), stage) for _ in range(3)]
            alone = [engine_over(Stack(), stage) for _ in range(3)]
            losses = [engine(rows(ROWS, WIDTH, seed=i)).square().mean() for i, engine in enumerate(engines)]
            if shares:
                torch.stack(losses).sum().backward()
            else:
                for engine, loss in zip(engines, losses, strict=True):
                    engine.backward(loss)
            for seed, (engine, one) in enumerate(zip(engines, alone, strict=True)):
                one.backward(one(rows(ROWS, WIDTH, seed=seed)).square().mean())
                for each in (engine, one):
                    each.step()
                assert_same(weights(engine), weights(one))


@on_ranks(2, timeout=120)
def test_state_on_a_disk_is_saved_and_loads_anywhere() -> None:
    with shared_folder() as folder, tempfile.TemporaryDirectory(prefix="zeropg-engine-") as disk:
        block = {"offload_optimizer": {"device": "nvme", "nvme_path": disk}}
        for stage in (1, 2, 3):
            saved = adam_over(Stack(), stage, zero=block)
            step(saved)
            saved.save_checkpoint(folder, tag=f"{stage}")
            expected = states(saved)
            step(saved, seed=1)
            for zero in (block, {}):
                loaded = adam_over(Stack(), stage, zero=zero)
                loaded.load_checkpoint(folder, tag=f"{stage}")
                assert_same(states(loaded), expected, relative=0)
                step(loaded, seed=1)
                assert_same(weights(loaded), weights(saved), relative=0)


@on_ranks(2, timeout=120)
def test_offload_of_any_share_and_several_backwards_change_nothing() -> None:
    for stage in (1, 2, 3):
        for ratio in (0.3, 1.0):
            plain = adam_over(Stack(), stage)
            offloaded = adam_over(Stack(), stage, zero={"offload_optimizer": {"device": "cpu", "ratio": ratio}})
            for engine in (offloaded, plain):
                for update in range(2):
                    for seed in range(2):  # two backwards, one step
                        engine.backward(engine(rows(ROWS, WIDTH, seed=2 * update + seed)).square().mean())
                    engine.step()
            assert_same(weights(offloaded), weights(plain), relative=0)
            assert offloaded.get_global_grad_norm() == plain.get_global_grad_norm()


@on_ranks(2, timeout=120)
def test_a_model_is_unwrapped_for_generation() -> None:
    import zeropg

    for stage in STAGES:
        engine = engine_over(Stack(), stage)
        sum_of_squares(engine)
        engine.step()
        with zeropg.full_parameters(engine.module), torch.no_grad():
            assert engine.module.first.weight.shape == (WIDTH, WIDTH)
            inner = engine.module.blocks[0](engine.module.first(rows(ROWS, WIDTH)))
        assert isinstance(inner, torch.Tensor) and isinstance(engine.module, nn.Module)
        sum_of_squares(engine)
        engine.step()
        assert engine.was_step_applied()
