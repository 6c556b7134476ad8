"""Writes checkpoints in DeepSpeed's format from whole tensors, as its documentation and its files describe it."""

from __future__ import annotations

import enum
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TAG = "global_step7"
STEP = 7
CLIENT_STATE = {"epoch": 4, "note": "kept"}


@dataclass
class Training:
    """What a job knows: whole tensors by name."""

    groups: list[list[str]]  # names of the trained parameters of each param group
    parameters: dict[str, torch.Tensor]  # fp32, trained and frozen, in the model's order
    state: dict[str, dict[str, torch.Tensor]]  # exp_avg and exp_avg_sq of the trained ones
    options: list[dict[str, Any]]  # of the param groups
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # other name -> name in `parameters`
    lr_scheduler: dict[str, Any] = field(default_factory=lambda: {"last_batch_iteration": 6})

    @property
    def trained(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def frozen(self) -> list[str]:
        return [name for name in self.parameters if name not in self.trained]


def make_training(model: torch.nn.Module, groups: list[list[torch.nn.Parameter]]) -> Training:
    """Random but plausible values for a model's own tensors. groups: the optimizer's, frozen parameters left out."""
    generator = torch.Generator().manual_seed(3)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    state = {
        name_of[id(p)]: {
            "exp_avg": torch.randn(p.shape, generator=generator),
            "exp_avg_sq": torch.rand(p.shape, generator=generator),
        }
        for group in groups
        for p in group
    }
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: name_of[id(parameter)] for name, parameter in every if name != name_of[id(parameter)]}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name in model.state_dict()}
    options = [
        {"lr": 0.5 + index, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.25 * index, "bias_correction": True}
        for index in range(len(groups))
    ]
    return Training([[name_of[id(p)] for p in group] for group in groups], parameters, state, options, buffers, tied)


def write_checkpoint(directory: Path, training: Training, *, stage: int, world_size: int, fp16: bool = False) -> Path:
    """Writes a tag and `latest`; returns the tag's folder."""
    folder = directory / TAG
    folder.mkdir(parents=True)
    (directory / "latest").write_text(TAG)
    with deepspeed_classes() as classes:
        scaler = classes["DynamicLossScaler"](cur_scale=512.0, cur_iter=6, last_overflow_iter=2, cur_hysteresis=1)
        common = {"loss_scaler": scaler if fp16 else None, "overflow": False}
        if stage == 0:
            _save(_model_file(training, stage, world_size, 0), folder / "mp_rank_00_model_states.pt")
        elif stage == 3:
            _write_stage_3(folder, training, world_size, common | {"zero_stage": classes["ZeroStageEnum"](3)})
        else:
            stages = {"zero_stage": classes["ZeroStageEnum"](stage)}
            _write_stage_1_or_2(folder, training, stage, world_size, common | stages)
    return folder


def write_universal(directory: Path, training: Training, *, world_size: int) -> Path:
    """Writes what the conversion makes of a checkpoint of stage 3; returns the tag's folder."""
    folder = directory / f"{TAG}_universal"
    folder.mkdir(parents=True)
    (directory / "latest_universal").write_text(folder.name)
    for rank in range(world_size):
        model_file = _model_file(training, 3, world_size, rank)
        _save(model_file, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for name in training.trained:
        (folder / "zero" / name).mkdir(parents=True)
        for key, value in {"fp32": training.parameters[name], **training.state[name]}.items():
            _save(value.flatten().clone(), folder / "zero" / name / f"{key}.pt")
    groups = [{"params": [index], **options} for index, options in enumerate(training.options)]
    inner = {"state": {index: {"step": torch.tensor(float(STEP))} for index in range(len(groups))}}
    common = {"zero_stage": 3, "param_groups": groups, "optimizer_state_dict": inner}
    _save(common, folder / "zero" / "optimizer_state.pt")
    return folder


def _write_stage_1_or_2(folder: Path, training: Training, stage: int, world_size: int, common: dict[str, Any]) -> None:
    _save(_model_file(training, stage, world_size, 0), folder / "mp_rank_00_model_states.pt")
    align = 2 * world_size
    for rank in range(world_size):
        masters, state = [], {}
        for index, names in enumerate(training.groups):
            numel = sum(training.parameters[name].numel() for name in names)
            size = align * math.ceil(numel / align) // world_size
            lean = max(0, min(size, numel - rank * size))
            masters.append(_partition([training.parameters[name] for name in names], rank, size)[:lean].clone())
            state[index] = {"step": torch.tensor(float(STEP))} | {
                key: _partition([training.state[name][key] for name in names], rank, size)
                for key in ("exp_avg", "exp_avg_sq")
            }
        groups = [{"params": [index], **options} for index, options in enumerate(training.options)]
        saved = common | {
            "base_optimizer_state": {"state": state, "param_groups": groups},
            "single_partition_of_fp32_groups": masters,
            "partition_count": [world_size] * len(training.groups),
            "param_alignment_paddings": [[0] * len(names) for names in training.groups],
        }
        content = {"optimizer_state_dict": saved, "ds_config": {}, "ds_version": "0.19.8"}
        _save(content, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _write_stage_3(folder: Path, training: Training, world_size: int, common: dict[str, Any]) -> None:
    for rank in range(world_size):
        model_file = _model_file(training, 3, world_size, rank)
        _save(model_file, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        masters, state = [], {}
        for index, names in enumerate(training.groups):
            masters.append(torch.cat([_part(training.parameters[name], rank, world_size) for name in names]))
            parts = {
                key: torch.cat([_part(training.state[name][key], rank, world_size) for name in names])
                for key in ("exp_avg", "exp_avg_sq")
            }
            state[index] = parts
        # As DeepSpeed's FusedAdam counts: per group.
        groups = [{"params": [i], "step": STEP, **options} for i, options in enumerate(training.options)]
        saved = common | {
            "partition_count": world_size,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": masters,
        }
        content = {"optimizer_state_dict": saved, "ds_config": {}, "ds_version": "0.19.8"}
        _save(content, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _model_file(training: Training, stage: int, world_size: int, rank: int) -> dict[str, Any]:
    whole = {name: value.clone() for name, value in training.parameters.items()}
    whole |= {name: whole[kept] for name, kept in training.tied.items()}
    module = whole if stage < 3 else {name: torch.empty(0) for name in whole}
    shapes = [OrderedDict((n, training.parameters[n].shape) for n in names) for names in training.groups]
    fragments = {n: _part(training.parameters[n], rank, world_size) for n in training.frozen}
    return {
        "module": OrderedDict(module | training.buffers),
        "buffer_names": list(training.buffers),
        "optimizer": _whole_optimizer(training) if stage == 0 else None,
        "param_shapes": shapes if stage > 0 else None,
        "frozen_param_shapes": {n: training.parameters[n].shape for n in training.frozen} if stage >= 2 else None,
        "shared_params": training.tied if stage > 0 and rank == 0 else {},
        "frozen_param_fragments": fragments if stage == 3 else None,
        "lr_scheduler": training.lr_scheduler,
        "skipped_steps": 1,
        "global_steps": STEP,
        "global_samples": 112,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 16},
        "ds_version": "0.19.8",
        **CLIENT_STATE,
    }


def _whole_optimizer(training: Training) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(training.trained)}
    state = {numbers[n]: {"step": torch.tensor(float(STEP)), **training.state[n]} for n in training.trained}
    groups = [
        {"params": [numbers[name] for name in names], **options}
        for names, options in zip(training.groups, training.options, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _partition(values: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    flat = torch.cat([value.flatten() for value in values])
    padded = torch.nn.functional.pad(flat, (0, max(0, (rank + 1) * size - flat.numel())))
    return padded[rank * size : (rank + 1) * size].clone()


def _part(value: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return _partition([value], rank, math.ceil(value.numel() / world_size))


def _save(content: Any, path: Path) -> None:
    torch.save(content, path)


@contextmanager
def deepspeed_classes() -> Iterator[dict[str, Any]]:
    """Classes that pickles call by DeepSpeed's names; nobody can import them afterwards."""

    class ZeroStageEnum(int, enum.Enum):
        optimizer_states = 1
        gradients = 2
        weights = 3

    class DynamicLossScaler:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

    classes = {
        "deepspeed.runtime.zero.config": ZeroStageEnum,
        "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    }
    before = dict(sys.modules)
    try:
        for name, kind in classes.items():
            kind.__module__, kind.__qualname__ = name, kind.__name__
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
            setattr(sys.modules[name], kind.__name__, kind)
        yield {kind.__name__: kind for kind in classes.values()}
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "deepspeed":
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.startswith("deepspeed")})
