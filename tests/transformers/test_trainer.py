"""zeropg.transformers.Trainer on real ranks, beside transformers' own Trainer under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.transformers.training import arguments, differ, llama, losses, norms, texts


def against_ddp(folder: str) -> list[str]:
    """Losses, norms, evaluation and predictions in every stage. Returns what differs."""
    import transformers

    from zeropg.transformers import Trainer

    data = {"train_dataset": texts(), "eval_dataset": texts(10, seed=5)}
    # The second one: an epoch whose last step has one micro-batch less.
    settings = [{}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 3}]
    plain = [transformers.Trainer(llama(), arguments(folder, **more), **data) for more in settings]
    for one in plain:
        one.train()
    expected = plain[0].evaluate()["eval_loss"]
    logits = plain[0].predict(texts(6, seed=6)).predictions
    wrong = [] if all(len(losses(one)) == 4 for one in plain) else ["the plain ones did not train"]
    for stage in range(4):
        trainers = [Trainer(llama(), arguments(folder, **more), zeropg={"stage": stage}, **data) for more in settings]
        for trainer, one in zip(trainers, plain, strict=True):
            trainer.train()
            if differ(losses(one), losses(trainer)) or differ(norms(one), norms(trainer), 1e-5):
                wrong.append(f"stage {stage}: {losses(trainer)} {norms(trainer)}")
        if differ([expected], [trainers[0].evaluate()["eval_loss"]]):
            wrong.append(f"stage {stage}: evaluate")
        predicted = trainers[0].predict(texts(6, seed=6)).predictions
        if not torch.allclose(torch.tensor(predicted), torch.tensor(logits), atol=1e-4):
            wrong.append(f"stage {stage}: predict")
    return wrong


@pytest.mark.slow
def test_losses_norms_and_predictions_are_those_of_the_plain_trainer_under_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, against_ddp, str(tmp_path), timeout=240) == [[], []]


def save(folder: str) -> list[Any]:
    """Four steps with a checkpoint every second, in bf16 with fp32 masters; the weights at the end."""
    import zeropg
    from zeropg.transformers import Trainer

    more = {"save_strategy": "steps", "save_steps": 2, "bf16": True}
    trainer = Trainer(llama(), arguments(folder, **more), train_dataset=texts(), zeropg={"stage": 3})
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return [losses(trainer), zeropg.full_state_dict(trainer.model, rank0_only=False)]


def resume(folder: str, batch: int) -> list[Any]:
    """The same from the second step on, in another stage; `batch` keeps the samples of a step."""
    import zeropg
    from zeropg.transformers import Trainer

    args = arguments(f"{folder}/again", per_device_train_batch_size=batch, bf16=True)
    trainer = Trainer(llama(seed=9), args, train_dataset=texts(), zeropg={"stage": 1})
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return [losses(trainer), zeropg.full_state_dict(trainer.model, rank0_only=False)]


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_at_the_same_and_at_other_world_sizes(tmp_path: Path) -> None:
    import transformers

    (expected, weights), _ = run_ranks(2, save, str(tmp_path), timeout=120)
    for ranks, tolerance in ((2, 0.0), (1, 2e-3)):
        for seen, restored in run_ranks(ranks, resume, str(tmp_path), 4 // ranks, timeout=120):
            assert not differ(seen, expected, max(tolerance, 1e-9)), (ranks, seen, expected)
            assert all(torch.allclose(restored[k], v, atol=10 * tolerance, rtol=0) for k, v in weights.items())
    assert set(texts_of(tmp_path / "checkpoint-4")) >= {"zeropg", "config.json", "model.safetensors", "scheduler.pt"}
    assert "optimizer.pt" not in texts_of(tmp_path / "checkpoint-4")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(value, weights[name].to(torch.bfloat16)) for name, value in loaded.state_dict().items())


def texts_of(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def best_and_plain(folder: str) -> list[str]:
    """load_best_model_at_end, model_init, and a checkpoint of transformers' own Trainer. Returns what is wrong."""
    import transformers

    import zeropg
    from zeropg.transformers import Trainer

    wrong = []
    more = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    for only in (False, True):
        args = arguments(f"{folder}/best{only}", **more, **best, save_only_model=only)
        trainer = Trainer(
            model_init=lambda: llama(), args=args, train_dataset=texts(), eval_dataset=texts(6), zeropg={"stage": 3}
        )
        trainer.train()
        history = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        if abs(trainer.evaluate()["eval_loss"] - max(history)) > 1e-6:
            wrong.append(f"the best of {history} (save_only_model={only}) was not loaded")
        again = losses(trainer)
        trainer.train()
        if losses(trainer) != again:
            wrong.append(f"a second train() of model_init: {again} {losses(trainer)}")
    plain = transformers.Trainer(
        llama(), arguments(f"{folder}/plain", save_strategy="steps", save_steps=2), train_dataset=texts()
    )
    plain.train()
    trainer = Trainer(llama(9), arguments(f"{folder}/on"), train_dataset=texts(), zeropg={"stage": 3})
    trainer.train(resume_from_checkpoint=f"{folder}/plain/checkpoint-2")
    if differ(losses(trainer), losses(plain)):
        wrong.append(f"from the plain Trainer's checkpoint: {losses(trainer)}, expected {losses(plain)}")
    evaluated = Trainer(llama(), arguments(folder), eval_dataset=texts(6), zeropg={"stage": 3})
    evaluated.evaluate()
    if not isinstance(evaluated.model, zeropg.FullyShardedModule):
        wrong.append("evaluate alone does not shard")
    return wrong


@pytest.mark.slow
def test_the_best_model_is_loaded_and_checkpoints_of_the_plain_trainer_too(tmp_path: Path) -> None:
    assert run_ranks(2, best_and_plain, str(tmp_path), timeout=240) == [[], []]


CONFIGURATION = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


def configured(folder: str) -> list[Any]:
    import transformers

    from zeropg.deepspeed.config import ConfigError
    from zeropg.transformers import Trainer

    trainer = Trainer(llama(), arguments(folder, deepspeed=CONFIGURATION), train_dataset=texts())
    trainer.train()
    stage = trainer.model._zeropg_state.core.stage
    short = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    short["gradient_accumulation_steps"] = "auto"
    in_bf16 = Trainer(llama(), arguments(folder, deepspeed=short, bf16=True, max_steps=1), train_dataset=texts())
    in_bf16.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    wrong = [] if in_bf16.model.dtype == torch.bfloat16 else [f"bf16=True computes in {in_bf16.model.dtype}"]
    for config, more in (
        ({**CONFIGURATION, "gradient_clipping": 3.0}, {}),
        ({**CONFIGURATION, "zero_optimization": {"stage": 7}}, {}),
        ({**CONFIGURATION, "tensor_parallel": {"autotp_size": 2}}, {}),
        (CONFIGURATION, {"zeropg": {"stage": 1}}),
    ):
        try:
            Trainer(llama(), arguments(folder, deepspeed=config), train_dataset=texts(), **more)
            wrong.append(f"{config} {more} were accepted")
        except (ConfigError, ValueError):
            pass
    for more, given in (({"bf16_full_eval": True}, {}), ({"auto_find_batch_size": True}, {}), ({}, {"stages": 3})):
        try:
            Trainer(llama(), arguments(folder, **more), train_dataset=texts(), zeropg=given)
            wrong.append(f"{more} {given} were accepted")
        except (NotImplementedError, TypeError) as error:
            if "[zeropg] Trainer" not in str(error):
                wrong.append(str(error))
    try:  # transformers' own arguments, which count one process without use_cpu
        Trainer(llama(), transformers.TrainingArguments(folder, report_to=[]), train_dataset=texts())
        wrong.append("a count of one process was accepted")
    except ValueError as error:
        wrong += [] if "use_cpu=True" in str(error) else [str(error)]
    half = Trainer(llama(), arguments(folder, fp16=True), train_dataset=texts(), zeropg={"stage": 3})
    half.train()
    again = arguments(folder, fp16=True, label_names=["target"], max_steps=1)
    second = Trainer(half.model, again, train_dataset=texts())
    second.train()
    if second.accelerator.scaler is None or not half.model._zeropg_state.is_label("target"):
        wrong.append("a second Trainer over a sharded model does not scale its loss, or does not know its labels")
    for more, given in (({"fp16": True}, {"stage": 1}), ({"bf16": True}, {})):
        try:
            Trainer(half.model, arguments(folder, **more), train_dataset=texts(), zeropg=given).train()
            wrong.append(f"{more} {given} were ignored by a sharded model")
        except ValueError as error:
            wrong += [] if "sharded already, with" in str(error) else [str(error)]
    return [stage, type(trainer.optimizer.optimizer).__name__, rates, wrong, losses(trainer), losses(half)]


def test_a_configuration_of_deepspeed_says_stage_optimizer_and_schedule(tmp_path: Path) -> None:
    for stage, optimizer, rates, wrong, seen, half in run_ranks(2, configured, str(tmp_path), timeout=120):
        assert (stage, optimizer, wrong) == (2, "ShardedOptimizer", [])
        assert rates == pytest.approx([0, 0, 1e-2, 1e-2])  # WarmupDecayLR's, whose first step is at 0
        assert seen[-1] < seen[0] and half[-1] < half[0]


class Regression(nn.Module):
    """Two layers, a batch norm where asked for, and the dtypes that a forward gets."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, 1)
        self.seen: list[Any] = []

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, target: torch.Tensor, **more: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        items = more["num_items_in_batch"]  # of a step, on all ranks; a float
        self.seen.append((x.dtype, labels.dtype, target.dtype, items.dtype, bool((labels == 1.001).all())))
        logits = self.last(self.norm(self.first(x))).squeeze(-1)
        loss = nn.functional.mse_loss(logits.float(), labels) + (logits - target).square().mean()
        return {"loss": loss, "logits": logits}


def regression(folder: str) -> list[str]:
    import transformers

    from zeropg.transformers import Trainer

    wrong = []
    rows = [{"x": torch.randn(8), "labels": torch.tensor(1.001), "target": torch.tensor(1.001)} for _ in range(16)]
    more = {"bf16": True, "label_names": ["labels", "target"], "max_grad_norm": 0.0}
    plain = transformers.Trainer(Regression(), arguments(folder, **more), train_dataset=rows)
    plain.train()
    for given in ({"stage": 1}, {"stage": 3}):
        trainer = Trainer(Regression(), arguments(folder, **more), train_dataset=rows, zeropg=given)
        trainer.train()
        expected = (torch.bfloat16, torch.float32, torch.float32, torch.float32, True)
        if set(trainer.model.seen) != {expected} or differ(losses(trainer), losses(plain), 2e-2):
            wrong.append(f"{given}: {set(trainer.model.seen)} {losses(trainer)}, under DDP {losses(plain)}")
    try:
        Trainer(Regression(norm=True), arguments(folder, **more), train_dataset=rows).train()
        wrong.append("a batch norm with statistics in fp32 was accepted")
    except ValueError as error:
        wrong += [] if "buffer_dtype=torch.bfloat16" in str(error) else [str(error)]
    given = {"stage": 3, "buffer_dtype": torch.bfloat16}
    trainer = Trainer(Regression(norm=True), arguments(folder, **more), train_dataset=rows, zeropg=given)
    trainer.train()
    wrong += [] if len(losses(trainer)) == 4 else ["buffer_dtype= does not train a batch norm"]
    return wrong


def test_labels_and_their_count_keep_their_dtype_and_batch_norms_in_two_dtypes_are_refused(tmp_path: Path) -> None:
    assert run_ranks(2, regression, str(tmp_path), timeout=120) == [[], []]


def alone(folder: str) -> list[float]:
    """Without torchrun's variables, as in a notebook: one process."""
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    from zeropg.transformers import Trainer

    trainer = Trainer(llama(), arguments(folder), train_dataset=texts())
    trainer.train()
    return losses(trainer)


def test_one_process_without_a_group_trains_too(tmp_path: Path) -> None:
    (seen,) = run_ranks(1, alone, str(tmp_path), backend=None)
    assert len(seen) == 4 and seen[-1] < seen[0]
