"""Checkpoints right after each other, in the middle of things, of tied and frozen weights, and how large they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.training import shared_folder
from tests.deepspeed.upstream.reference import ROWS, assert_same, rows, weights
from tests.deepspeed.upstream.test_user_backward import WIDTH, Stack
from tests.sharding.ranks import STAGES, on_ranks, raises


def adam_over(model: nn.Module, stage: int, scheduler: bool = False, **more: Any) -> Any:
    from zeropg import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": more.pop("gas", 1),
        "zero_optimization": {"stage": stage, **more.pop("zero", {})},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    if scheduler:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | more)[0]


def step(engine: Any, seed: int = 0) -> None:
    engine.backward(engine(rows(ROWS, WIDTH, seed=seed)).float().square().mean())
    engine.step()


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Adam's whole state, by parameter and key."""
    from zeropg.deepspeed.utils import safe_get_full_optimizer_state

    return {
        f"{name}/{key}": safe_get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
        for key in ("exp_avg", "exp_avg_sq")
    }


@on_ranks(2, timeout=120)
def test_state_is_loaded_or_left_as_told() -> None:
    with shared_folder() as folder:
        offload = {"zero": {"offload_optimizer": {"device": "cpu"}}}
        for stage, more in ((0, {}), (1, {"bf16": {"enabled": True}}), (2, offload), (3, {})):
            saved = adam_over(Stack(freezes=True), stage, **more)
            step(saved)
            saved.save_checkpoint(folder, tag=f"{stage}")
            loaded = adam_over(Stack(freezes=True), stage, **more)
            loaded.load_checkpoint(folder, tag=f"{stage}")
            assert_same(weights(loaded), weights(saved), relative=0)
            assert_same(states(loaded), states(saved), relative=0)
            for name in ("load_optimizer_states", "load_module_only"):
                other = adam_over(Stack(freezes=True), stage, **more)
                other.load_checkpoint(folder, tag=f"{stage}", **{name: name == "load_module_only"})
                assert_same(weights(other), weights(saved), relative=0)
                assert not any(other.optimizer.state.values())
                assert other.global_steps == (0 if name == "load_module_only" else 1)


@on_ranks(2, timeout=120)
def test_a_save_may_follow_a_load_and_a_load_a_save() -> None:
    with shared_folder() as folder:
        for stage in STAGES:
            engine = adam_over(Stack(), stage)
            engine.save_checkpoint(folder, tag="fresh")
            engine.load_checkpoint(folder, tag="fresh")
            step(engine)
            engine.save_checkpoint(folder, tag="stepped")
            again = adam_over(Stack(), stage)
            again.load_checkpoint(folder, tag="stepped")
            again.save_checkpoint(folder, tag="again")
            last = adam_over(Stack(), stage)
            last.load_checkpoint(folder, tag="again")
            assert_same(weights(last), weights(engine), relative=0)
            assert_same(states(last), states(engine), relative=0)
            for one in (engine, last):
                step(one, seed=1)
            assert_same(weights(last), weights(engine), relative=0)


@on_ranks(2, timeout=120)
def test_a_save_in_the_middle_of_an_accumulation_changes_nothing() -> None:
    with shared_folder() as folder:
        for stage in STAGES:
            saving, plain = (adam_over(Stack(), stage, gas=2) for _ in range(2))
            for engine in (saving, plain):
                step(engine, seed=0)
                if engine is saving:
                    engine.save_checkpoint(folder, tag="half")
                step(engine, seed=1)
                assert engine.was_step_applied()
            assert_same(weights(saving), weights(plain), relative=0)


@on_ranks(2, timeout=120)
def test_files_hold_no_more_than_the_tensors() -> None:
    with shared_folder() as folder:
        for stage in STAGES:
            engine = adam_over(Stack(), stage)
            step(engine)
            engine.save_checkpoint(folder, tag=f"{stage}")
            tensors = [*weights(engine).values(), *states(engine).values()]
            needed = sum(tensor.nbytes for tensor in tensors)
            written = sum(path.stat().st_size for path in Path(folder, f"{stage}").rglob("*.safetensors"))
            assert needed <= written < needed + 32768, (needed, written)
            dist.barrier()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


@on_ranks(2, timeout=120)
def test_tied_weights_stay_tied_also_in_exports() -> None:
    from zeropg import __main__ as program
    from zeropg.deepspeed.checkpoints.state_dict import read_state_dict

    with shared_folder() as folder:
        for stage in STAGES:
            engine = adam_over(Tied(), stage)
            step(engine)
            engine.save_checkpoint(folder, tag=f"{stage}")
            if dist.get_rank() == 0:
                out = Path(folder, f"out{stage}")
                assert program.main(["zero_to_fp32", folder, str(out), "--tag", f"{stage}"]) == 0
                exported = torch.load(out / "pytorch_model.bin", weights_only=True)
                model = Tied()
                model.load_state_dict(exported)
                saved = read_state_dict(Path(folder, f"{stage}"), is_deepspeeds=False)
                assert torch.equal(model.first.weight, saved["first.weight"])
                assert model.last.weight is model.first.weight and saved["last.weight"] is saved["first.weight"]
            loaded = adam_over(Tied(), stage)
            loaded.load_checkpoint(folder, tag=f"{stage}")
            assert_same(weights(loaded), weights(engine), relative=0)
            assert loaded.module.first.weight is loaded.module.last.weight


@on_ranks(2, timeout=120)
def test_latest_and_tags() -> None:
    with shared_folder() as folder:
        engine = adam_over(Stack(), 2)
        assert engine.load_checkpoint(folder) == (None, None), "there is no latest"
        engine.save_checkpoint(folder, tag=7)  # as a string
        engine.save_checkpoint(folder, save_latest=False, tag="other")
        assert Path(folder, "latest").read_text() == "7"
        assert engine.load_checkpoint(folder)[0] == str(Path(folder, "7"))
        for mode in ("Fail", "Warn", "Ignore"):
            named = adam_over(Stack(), 1, checkpoint={"tag_validation": mode})
            with raises(ValueError, "tag is 'tag-0' on rank 0"):
                named.save_checkpoint(folder, tag=f"tag-{dist.get_rank()}")
        with raises(ValueError, "checkpoint.tag_validation", "'WARN', 'IGNORE' or 'FAIL'"):
            adam_over(Stack(), 1, checkpoint={"tag_validation": "foo"})
        for empty in ("", None):
            with raises((ValueError, TypeError)):
                engine.save_checkpoint(empty)


@on_ranks(2, timeout=120)
def test_schedulers_are_loaded_or_left_as_told() -> None:
    with shared_folder() as folder:
        for stage in STAGES:
            saved = adam_over(Stack(), stage, scheduler=True)
            for seed in range(3):
                step(saved, seed)
            saved.save_checkpoint(folder, tag=f"{stage}")
            loaded, left = (adam_over(Stack(), stage, scheduler=True) for _ in range(2))
            first = left.get_lr()
            loaded.load_checkpoint(folder, tag=f"{stage}")
            left.load_checkpoint(folder, tag=f"{stage}", load_lr_scheduler_states=False, load_optimizer_states=False)
            assert loaded.lr_scheduler.state_dict() == saved.lr_scheduler.state_dict()
            assert left.get_lr() == first != loaded.get_lr() == saved.get_lr()
            for one in (saved, loaded):
                step(one, seed=5)
            assert loaded.get_lr() == saved.get_lr()
            assert_same(weights(loaded), weights(saved), relative=0)
