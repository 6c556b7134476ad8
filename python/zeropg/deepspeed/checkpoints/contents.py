"""What a checkpoint of DeepSpeed's holds, whatever its stage, as whole tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropg.deepspeed.checkpoints.stored import Stored

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# What DeepSpeed puts into its model file; all else is the program's client state.
_OWN_KEYS = {
    *COUNTERS,
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "num_experts",
    "ds_autoep_layers",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
}


@dataclass(frozen=True)
class SavedGroup:
    """A param group. names: of its parameters; options: lr and so on."""

    names: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class SavedState:
    """An optimizer's state: per element, and numbers such as `step`, by parameter name and key."""

    groups: list[SavedGroup]
    tensors: dict[str, dict[str, Stored]]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Contents:
    """One tag.

    Attributes:
        stage: 0 to 3.
        world_size: of the job that saved.
        tensors: parameters, in fp32 where DeepSpeed has them so, and buffers.
        aliases: other names of tied parameters -> the name in `tensors`.
        frozen: names of the parameters that no optimizer held.
        optimizer_class: what the job's configuration calls its optimizer, as torch names it; None: it says nothing.
        loss_scale: as `LossScaler.load_state_dict` takes it; {} without fp16.
    """

    folder: Path
    stage: int
    world_size: int
    tensors: dict[str, Stored]
    aliases: dict[str, str]
    frozen: frozenset[str]
    optimizer: SavedState | None
    optimizer_class: str | None
    counters: dict[str, int]
    lr_scheduler: dict[str, Any]
    loss_scale: dict[str, Any]
    client_state: dict[str, Any]


def optimizer_class(model_file: Mapping[str, Any]) -> str | None:
    config = model_file.get("ds_config")
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(kind, str):
        return None
    is_decoupled = (section.get("params") or {}).get("adam_w_mode", True)  # DeepSpeed's Adam is AdamW by default
    return {"adamw": "AdamW", "adam": "AdamW" if is_decoupled else "Adam"}.get(kind.lower(), kind)


def client_state(model_file: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model_file.items() if key not in _OWN_KEYS}


def loss_scale(scaler: Any) -> dict[str, Any]:
    """What LossScaler takes of DeepSpeed's scaler object, or of what its plain fp16 optimizer saves as numbers."""
    saved = scaler if isinstance(scaler, Mapping) else vars(scaler) if hasattr(scaler, "__dict__") else {}
    if "cur_iter" not in saved or "last_overflow_iter" not in saved:
        return {}  # static, or none
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {"is_dynamic": True, **{name: saved[name] for name in names if name in saved}}
