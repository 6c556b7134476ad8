"""zeropg.transformers.Seq2SeqTrainer generates as transformers' own does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.transformers.training import arguments, differ, losses, texts


def t5() -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 64,
        "dropout_rate": 0.0,
    }
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens))


def generate(folder: str) -> list[str]:
    """In stages 2 and 3, beside the plain one. Returns what differs."""
    import transformers

    from zeropg.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    def run(kind: Any, **more: Any) -> list[float]:
        args = arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=9)
        data = {"train_dataset": texts(), "eval_dataset": texts(6, seed=5)}
        metrics = lambda predicted: {"sum": int(predicted.predictions.sum())}  # noqa: E731
        trainer = kind(t5(), args, compute_metrics=metrics, **data, **more)
        trainer.train()
        found = trainer.evaluate()
        return [*losses(trainer), found["eval_loss"], found["eval_sum"]]

    expected = run(transformers.Seq2SeqTrainer)
    found = {stage: run(Seq2SeqTrainer, zeropg={"stage": stage}) for stage in (2, 3)}
    wrong = [f"stage {stage}: {seen}, not {expected}" for stage, seen in found.items() if differ(seen, expected, 1e-5)]
    return wrong + generate_by_engine()


def generate_by_engine() -> list[str]:
    """A model that begins by its encoder, which no call of its own makes whole. Returns what is wrong."""
    import torch

    from zeropg import deepspeed

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=t5(), config=config)
    tokens = texts(2)[0]["input_ids"][None]
    expected = t5().eval().generate(input_ids=tokens, max_new_tokens=5)
    found = engine.eval().generate(input_ids=tokens, max_new_tokens=5)
    return [] if torch.equal(found, expected) else [f"the engine generates {found}, not {expected}"]


def speech(folder: str) -> list[str]:
    """A model of floating inputs, computed in bf16. Returns what is wrong."""
    import torch
    import transformers

    from zeropg.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 32, "num_mel_bins": 8}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        **sizes, **layers, **tokens, max_source_positions=10, max_target_positions=16, begin_suppress_tokens=None
    )
    data = [{"input_features": torch.randn(8, 20).tolist(), "labels": [3, 4, 5, 2]} for _ in range(4)]
    wrong = []
    for stage in (2, 3):
        args = arguments(
            folder, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6, bf16=True
        )
        model = transformers.WhisperForConditionalGeneration(config)
        trainer = Seq2SeqTrainer(model, args, eval_dataset=data, train_dataset=data, zeropg={"stage": stage})
        trainer.train()
        found = trainer.evaluate()
        wrong += [] if found["eval_loss"] < 10 else [f"stage {stage}: {found}"]
    return wrong


def test_floating_inputs_are_cast_for_what_generates(tmp_path: Path) -> None:
    assert run_ranks(2, speech, str(tmp_path), timeout=120) == [[], []]


def test_evaluations_that_generate_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    assert run_ranks(2, generate, str(tmp_path), timeout=120) == [[], []]
