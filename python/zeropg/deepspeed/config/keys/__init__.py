"""The registry: `KEYS` has a row for each key of the models in `blocks` and `Config`, which says what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping

from zeropg.deepspeed.config.keys.elsewhere import ELSEWHERE, REMOVED
from zeropg.deepspeed.config.keys.key import Fate, Key
from zeropg.deepspeed.config.keys.parallel import TENSOR_PARALLEL
from zeropg.deepspeed.config.keys.running import (
    CHECKPOINT,
    COMET,
    CSV,
    MEMORY,
    OBSERVATION,
    RECOMPUTATION,
    TENSORBOARD,
    WANDB,
)
from zeropg.deepspeed.config.keys.training import AUTOCAST, BATCH, BF16, COMMUNICATION, DATA_TYPES, FP16, UPDATE
from zeropg.deepspeed.config.keys.zero import AIO, BESIDE_ZERO, ZERO

__all__ = ["KEYS", "Fate", "Key"]

# Block ("": none) and the rows of its keys.
_ROWS: tuple[tuple[str, Mapping[str, Key]], ...] = (
    ("", BATCH),
    ("zero_optimization.", ZERO),
    ("", BESIDE_ZERO),
    ("aio.", AIO),
    ("tensor_parallel.", TENSOR_PARALLEL),
    ("fp16.", FP16),
    ("bf16.", BF16),
    ("torch_autocast.", AUTOCAST),
    ("data_types.", DATA_TYPES),
    ("", UPDATE),
    ("", COMMUNICATION),
    ("activation_checkpointing.", RECOMPUTATION),
    ("checkpoint.", CHECKPOINT),
    ("", MEMORY),
    ("", OBSERVATION),
    ("tensorboard.", TENSORBOARD),
    ("csv_monitor.", CSV),
    ("wandb.", WANDB),
    ("comet.", COMET),
    ("", ELSEWHERE),
    ("", REMOVED),
)

KEYS: dict[str, Key] = {block + name: key for block, rows in _ROWS for name, key in rows.items()}
