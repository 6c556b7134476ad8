"""A tiny Llama, its data, and a run of a Trainer on every rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def llama(seed: int = 1, **more: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **more}))


def texts(count: int = 32, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Rows of 12 tokens; labels of some are masked, so that ranks count other numbers of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        tokens = torch.randint(0, 64, (12,), generator=generator).sort().values
        labels = tokens.clone()
        labels[: index % 5] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def arguments(folder: Any, kind: Any = None, **more: Any) -> Any:
    """kind: of the arguments; default: zeropg's TrainingArguments."""
    from zeropg.transformers import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
    }
    return (kind or TrainingArguments)(**{**settings, **more})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def differ(a: list[float], b: list[float], tolerance: float = 2e-6) -> bool:
    return len(a) != len(b) or not all(math.isclose(x, y, rel_tol=tolerance) for x, y in zip(a, b, strict=True))
