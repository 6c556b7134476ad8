"""`read`: from a file, a text or a dictionary to a `Config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeropg.deepspeed.config.batch import batch_sizes
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.config.source import load


def read(config: str | Path | dict[str, Any], *, world_size: int) -> Config:
    """Returns DeepSpeed's configuration, complete.

    Args:
        config: a path of a JSON file, JSON in URL-safe base64 as DeepSpeed takes it, or a dictionary, which stays as it
            is.
        world_size: ranks among which batches are divided.

    Raises ConfigError, which names the key, what was expected and what to use instead.
    """
    found = Config.model_validate(load(config))
    sizes = batch_sizes(
        found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps, world_size
    )
    return found.model_copy(update=sizes._asdict())
