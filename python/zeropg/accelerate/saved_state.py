"""What `ShardedAccelerator.save_state` writes of sharded models, and its way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zeropg.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from zeropg.optim.shard_optimizer import ShardedOptimizer

Parts = list[tuple[nn.Module, list[ShardedOptimizer]]]


def save_sharded(directory: Path, parts: Parts, extra: dict[str, Any]) -> None:
    """Saves each model and its optimizers into a folder of its own; `extra` goes with each. Collective."""
    for index, (model, optimizers) in enumerate(parts):
        save_checkpoint(_folder(directory, index), model, optimizers or None, extra=extra)


def load_sharded(directory: Path, parts: Parts) -> dict[str, Any]:
    """Loads what `save_sharded` wrote; returns `extra`. Collective."""
    extra: dict[str, Any] = {}
    for index, (model, optimizers) in enumerate(parts):
        extra, _ = load_checkpoint(_folder(directory, index), model, optimizers or None)
    return extra


def _folder(directory: Path, index: int) -> Path:
    return directory / f"zeropg_{index}"
