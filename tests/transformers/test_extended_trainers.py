"""Classes that extend transformers' Trainer, TRL's among them, do behind zeropg's what they do under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("trl")

from tests.transformers.training import arguments, differ, losses, norms

WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "f"]


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "f"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def rows(**columns: list[Any]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({name: values * 16 for name, values in columns.items()})


def run(trainer: type, config: type, folder: str, given: dict[str, Any], data: Any, **more: Any) -> list[float]:
    from tests.transformers.training import llama

    args = arguments(folder, config, warmup_steps=0, **given)
    tokens = {"pad_token_id": 0, "eos_token_id": 1}
    if more.pop("has_reference", False):
        more["ref_model"] = llama(**tokens)
    made = trainer(model=llama(**tokens), args=args, train_dataset=data, processing_class=tokenizer(), **more)
    made.train()
    return [*losses(made), *norms(made)]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [completion.count("a") - 0.1 * len(completion) for completion in completions]


def beside_ddp(folder: str) -> list[str]:
    """Returns what differs."""
    import peft
    import trl

    import zeropg.transformers as ours

    prompts = ["a b c", "b a", "c d", "f"]
    answers = {"chosen": ["d e", "f", "a", "b c"], "rejected": ["f a", "c", "e e", "d"]}
    to_tune = rows(text=["a b c d e f a b c", "b a", "c d c d"])
    lora = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    generations = {"num_generations": 2, "max_completion_length": 8}
    cases: list[tuple[type, type, tuple[int, ...], dict[str, Any], Any, dict[str, Any]]] = [
        (trl.SFTTrainer, trl.SFTConfig, (2, 3), {"max_length": 16}, to_tune, {}),
        (trl.SFTTrainer, trl.SFTConfig, (3,), {"gradient_checkpointing": True}, to_tune, lora),
        (trl.DPOTrainer, trl.DPOConfig, (3,), {}, rows(prompt=prompts, **answers), {"has_reference": True}),
        (trl.GRPOTrainer, trl.GRPOConfig, (3,), generations, rows(prompt=prompts), {"reward_funcs": reward}),
    ]
    wrong = []
    for trainer, config, stages, given, data, more in cases:
        options = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, **given}
        expected = run(trainer, config, folder, options, data, **more)
        sharded = type("Sharded", (ours.Trainer, trainer), {})
        arguments_too = type("Arguments", (config, ours.TrainingArguments), {})
        for stage in stages:
            found = run(sharded, arguments_too, folder, options, data, **more, zeropg={"stage": stage})
            if differ(found, expected, 2e-5):
                wrong.append(f"{trainer.__name__} in stage {stage}: {found}, not {expected}")
    return wrong


def save_in_its_own_way(folder: str) -> None:
    import safetensors.torch
    import torch
    import torch.distributed as dist
    import transformers

    import zeropg
    import zeropg.transformers as ours
    from tests.transformers.training import llama, texts

    class Saving(transformers.Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            assert dist.get_rank() == 0
            self.model.save_pretrained(output_dir)

    sharded = type("Sharded", (ours.Trainer, Saving), {})
    for stage in (2, 3):
        trainer = sharded(llama(), arguments(folder), train_dataset=texts(), zeropg={"stage": stage})
        trainer.train()
        trainer.save_model(folder)
        expected = zeropg.full_state_dict(trainer.model, rank0_only=False)
        dist.barrier()
        saved = safetensors.torch.load_file(f"{folder}/model.safetensors")
        assert saved and all(torch.equal(value, expected[name]) for name, value in saved.items())


def test_a_class_that_saves_the_model_by_itself_finds_it_whole(tmp_path: Path) -> None:
    run_ranks(2, save_in_its_own_way, str(tmp_path))


def test_trainers_of_trl_train_as_under_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, beside_ddp, str(tmp_path), timeout=300) == [[], []]


def test_defaults_of_a_configuration_are_its_own(tmp_path: Path) -> None:
    import dataclasses

    import trl

    from zeropg.transformers import TrainingArguments

    made = type("Arguments", (trl.SFTConfig, TrainingArguments), {})(output_dir=str(tmp_path), bf16=False)
    assert made.learning_rate == trl.SFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True).learning_rate
    lost = dataclasses.dataclass(type("Arguments", (TrainingArguments, trl.SFTConfig), {}))
    with pytest.raises(TypeError, match=r"SFTConfig \(.*learning_rate.*\) are lost; .* SFTConfig first"):
        lost(output_dir=str(tmp_path), bf16=False)
