"""A Trainer with DeepSpeed's configuration does what DeepSpeed's engine does with it, or says that it does not."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed.foreign_files import STEP, TAG, Training, make_training, write_checkpoint
from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.transformers.training import arguments, llama, losses, norms, texts

AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


def trainer_of(folder: str, config: dict[str, Any], kind: Any = None, **more: Any) -> Any:
    from zeropg.transformers import Trainer

    return (kind or Trainer)(llama(), arguments(folder, deepspeed=AUTO | config, **more), train_dataset=texts())


def nonfinite_steps(folder: str) -> list[str]:
    """The second of four steps has an infinite loss on one rank. Returns what is wrong."""
    import zeropg
    from zeropg.transformers import Trainer

    class Overflowing(Trainer):
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            loss = super().compute_loss(*args, **kwargs)
            return loss * torch.inf if self.calls == 3 and dist.get_rank() == 1 else loss

    wrong = []
    for config, more, skipped in (
        ({}, {}, 1),
        ({"zero_optimization": {"stage": 3}}, {"bf16": True, "max_grad_norm": 0.0}, 1),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"bf16": True}, 0),
        ({"zero_optimization": {"stage": 1}, "optimizer": ONE_BIT}, {}, 1),
    ):
        trainer = trainer_of(folder, config, Overflowing, **more)
        trainer.train()
        weights = zeropg.full_state_dict(trainer.model, rank0_only=False).values()
        is_finite = all(bool(value.isfinite().all()) for value in weights)
        steps = trainer.lr_scheduler.last_epoch
        if steps != 4 - skipped or is_finite != (skipped == 1):
            wrong.append(f"{config}: {steps} steps of the schedule, weights are finite: {is_finite}")
    return wrong


ONE_BIT = {"type": "OneBitAdam", "params": {"lr": "auto", "weight_decay": "auto", "freeze_step": 1}}


def optimizers(folder: str) -> list[str]:
    """Muon, which chooses parameters; 1-bit Adam, which clips itself; states in 16 bits. Returns what is wrong."""
    import zeropg
    from zeropg.transformers import Trainer

    wrong = []
    trainer = trainer_of(folder, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, max_steps=1)
    trainer.train()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    by_muon = {names[id(p)] for group in trainer.optimizer.param_groups if group["use_muon"] for p in group["params"]}
    expected = {n for n, p in trainer.model.named_parameters() if p.ndim == 2 and "embed" not in n}
    wrong += [] if by_muon == expected else [f"Muon steps {sorted(by_muon ^ expected)} wrongly"]
    for clip, more in ((0.5, {}), (0.0, {}), (0.5, {"fp16": True})):
        config = {key: value for key, value in AUTO.items() if key != "gradient_clipping"}
        config |= {"optimizer": ONE_BIT, "zero_optimization": {"stage": 1}}
        config |= {"fp16": {"enabled": "auto", "initial_scale_power": 4}}
        args = arguments(folder, deepspeed=config, max_grad_norm=clip, **more)
        trainer = Trainer(llama(), args, train_dataset=texts())
        trainer.train()
        if not all(map(math.isfinite, losses(trainer))) or not 0 < len(norms(trainer)) < 4:
            wrong.append(f"OneBitAdam, clip {clip}, {more}: {losses(trainer)} {norms(trainer)}")
        if (trainer.optimizer.optimizer._wrapped.clip or 0.0) != clip:
            wrong.append(f"OneBitAdam clips to {trainer.optimizer.optimizer._wrapped.clip}, not {clip}")
    model = llama()
    own = zeropg.optim.OneBitAdam(model.parameters(), warmup_steps=1, clip=0.1)
    for call, words in (
        (lambda: trainer_of(folder, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, bf16=True), "AdamW("),
        (
            lambda: Trainer(
                model, arguments(folder), train_dataset=texts(), optimizers=(own, None), zeropg={"stage": 1}
            ),
            "clip by the optimizer's clip=",
        ),
    ):
        try:
            call().train()
            wrong.append(f"accepted: {words}")
        except (RuntimeError, ValueError) as error:
            wrong += [] if words in str(error) else [str(error)]
    return wrong


OBSERVED = {
    "csv_monitor": {"enabled": True},
    "steps_per_print": 5,
    "wall_clock_breakdown": True,
    "flops_profiler": {"enabled": True},
    "comms_logger": {"enabled": True},
}


def keys(folder: str) -> list[Any]:
    """What is said about keys, and in which dtype a layer computes under torch_autocast."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeropg").addHandler(handler)
    for _ in range(2):
        trainer = trainer_of(folder, OBSERVED | {"torch_autocast": {"enabled": True}}, max_steps=1)
    dtypes = set()
    layer = trainer.model.model.layers[0].mlp.gate_proj
    layer.register_forward_hook(lambda module, inputs, output: dtypes.add((module.weight.dtype, output.dtype)))
    trainer.train()
    return [sorted(line.split()[2] for line in said if "does nothing under the Trainer" in line), dtypes]


def engines_ways(folder: str) -> list[Any]:
    return [nonfinite_steps(folder), optimizers(folder), keys(folder)]


def test_steps_optimizers_and_keys_are_as_under_the_engine(tmp_path: Path) -> None:
    for rank, (steps, optimizers, (named, dtypes)) in enumerate(run_ranks(2, engines_ways, str(tmp_path), timeout=240)):
        assert (steps, optimizers) == ([], [])
        assert named == (sorted(OBSERVED) if rank == 0 else [])
        assert dtypes == {(torch.float32, torch.bfloat16)}


def foreign(folder: Path) -> Training:
    """Makes a checkpoint of a Trainer one that transformers' own has saved under DeepSpeed."""
    from zeropg.transformers import Trainer

    args = arguments(folder, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = Trainer(llama(), args, train_dataset=texts(), zeropg={"stage": 0})
    trainer.train()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    model = llama(seed=5)
    groups = [[model.get_parameter(names[id(p)]) for p in g["params"]] for g in trainer.optimizer.param_groups]
    training = make_training(model, groups)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint-2" / "zeropg")
        write_checkpoint(folder / "checkpoint-2", training, stage=2, world_size=2)
    dist.barrier()
    return training


def resume(folder: str) -> list[str]:
    """Returns what is wrong in the state with which the first step begins."""
    import transformers

    import zeropg
    from zeropg.transformers import Trainer

    training = foreign(Path(folder))
    checkpoint = f"{folder}/checkpoint-2"
    wrong: list[str] = []

    class Look(transformers.TrainerCallback):
        def __init__(self, position: int) -> None:
            self.position = position

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            optimizer = given["optimizer"].optimizer
            weights = zeropg.full_state_dict(given["model"], rank0_only=False)
            saved = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
            wrong.extend(name for name, value in training.parameters.items() if not torch.equal(weights[name], value))
            for name, state in training.state.items():
                same = all(torch.equal(saved[name][key], value) for key, value in state.items())
                wrong.extend([] if same and saved[name]["step"] == STEP else [f"the state of {name}"])
            found = [(group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
            expected = [(options["betas"], options["weight_decay"]) for options in training.options]
            wrong.extend([] if found == expected else [f"groups have {found}"])
            schedule = given["lr_scheduler"]
            position = getattr(schedule, "last_epoch", None) or schedule.last_batch_iteration
            wrong.extend([] if position == self.position else [f"the schedule is at {position}"])

    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}
    for config, position in (({}, 2), (schedule, 6)):  # the Trainer's own has a file, DeepSpeed's has none
        if config and dist.get_rank() == 0:
            (Path(checkpoint) / "scheduler.pt").unlink()
        dist.barrier()
        args = arguments(f"{folder}/on", max_steps=3, deepspeed=AUTO | config)
        trainer = Trainer(llama(seed=9), args, train_dataset=texts(), callbacks=[Look(position)])
        trainer.train(resume_from_checkpoint=checkpoint)
        wrong += [] if trainer.state.global_step == 3 else [f"ended at step {trainer.state.global_step}"]
    cosine = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 3}}}
    args = arguments(f"{folder}/on", max_steps=3, deepspeed=AUTO | cosine)
    try:
        Trainer(llama(seed=9), args, train_dataset=texts()).train(resume_from_checkpoint=checkpoint)
        wrong.append("the schedule of another class was accepted")
    except ValueError as error:
        words = "make one of the class that was saved; the model and its optimizer are loaded"
        wrong += [] if words in str(error) else [str(error)]
    if dist.get_rank() == 0:
        (Path(checkpoint) / "latest").unlink()
    dist.barrier()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        wrong.append("a checkpoint that names no tag was accepted")
    except FileNotFoundError as error:
        wrong += [] if f"tags there: {TAG}" in str(error) else [str(error)]
    return wrong


def test_training_goes_on_from_what_transformers_saved_under_deepspeed(tmp_path: Path) -> None:
    assert run_ranks(2, resume, str(tmp_path), timeout=120) == [[], []]
