"""Checkpoints of transformers' Trainer under DeepSpeed: the Trainer's files beside a tag's folder of DeepSpeed's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.trainer import SCHEDULER_NAME

from zeropg.deepspeed.checkpoints.folder import LATEST, LATEST_UNIVERSAL, tag_folder
from zeropg.deepspeed.schedules import check_schedule


def find_tag(checkpoint: Path, *, universal: bool) -> str:
    """Returns the name of the tag that DeepSpeed's engine has saved into a checkpoint of the Trainer, "" without one.

    universal: whether it is the one that `latest_universal` names. Raises FileNotFoundError where none is named.
    """
    has_names = any((checkpoint / name).is_file() for name in (LATEST, LATEST_UNIVERSAL))
    if not has_names and not any(checkpoint.glob("global_step*")):
        return ""
    chosen = checkpoint / LATEST_UNIVERSAL
    return tag_folder(checkpoint, chosen.read_text().strip() if universal and chosen.is_file() else None).name


def load_schedule(checkpoint: Path, scheduler: Any, of_engine: dict[str, Any]) -> None:
    """Sets a scheduler: transformers' own has a file, the configuration's went with DeepSpeed's engine.

    of_engine: what the tag holds of a scheduler. Raises ValueError where there is neither, or another scheduler's.
    """
    file = checkpoint / SCHEDULER_NAME
    saved = torch.load(file, weights_only=True) if file.is_file() else of_engine
    if not saved:
        raise ValueError(
            f"[zeropg] Trainer: '{checkpoint}' holds no state of a scheduler, neither {SCHEDULER_NAME} nor one of "
            "DeepSpeed's engine; the model and its optimizer are loaded. Pass the folder as it was saved"
        )
    try:
        check_schedule(saved, scheduler)
    except ValueError as error:
        raise ValueError(
            f"[zeropg] Trainer: {error}; the model and its optimizer are loaded from '{checkpoint}'"
        ) from error
    scheduler.load_state_dict(saved)
