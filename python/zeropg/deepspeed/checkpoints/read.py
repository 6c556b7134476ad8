"""Reads what a tag of DeepSpeed's holds. Tensors are only looked at; their values are read where they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeropg.deepspeed.checkpoints import universal
from zeropg.deepspeed.checkpoints.contents import (
    COUNTERS,
    Contents,
    SavedState,
    client_state,
    loss_scale,
    optimizer_class,
)
from zeropg.deepspeed.checkpoints.folder import Files, find_files
from zeropg.deepspeed.checkpoints.partitions import Shapes
from zeropg.deepspeed.checkpoints.pickles import read_pickle
from zeropg.deepspeed.checkpoints.plain import Names, split_optimizer
from zeropg.deepspeed.checkpoints.stored import Stored, whole
from zeropg.deepspeed.checkpoints.zero import ZeroFiles, frozen_parts, shapes_in

_SAMPLE = 256  # elements of a tensor that are compared


def read_contents(folder: Path, group_names: Names | None = None, *, with_state: bool = True) -> Contents:
    """Reads a tag's folder; compares all its files with each other.

    Args:
        group_names: of the optimizer's parameters, which stage 0 saves without names; None: its state is left out.
        with_state: False: leave the optimizer's state out.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or refused, or the files are of more than one checkpoint.
    """
    files = find_files(folder)
    try:
        models = [_model_in(path) for path in files.models]
        _check_same_step(files, models)
        return _read(files, models, group_names, with_state)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"'{folder}' is not laid out as DeepSpeed lays checkpoints out ({type(error).__name__}: {error})"
        ) from error


class _Trained(NamedTuple):
    """What the optimizer held: masters by name, its state, and the loss scale."""

    stage: int
    masters: dict[str, Stored]
    scaler: Any
    state: SavedState | None


def _read(files: Files, models: list[Mapping[str, Any]], group_names: Names | None, with_state: bool) -> Contents:
    first = models[0]
    shapes = shapes_in(first)
    tensors = _tensors(files, models, trained={name for group in shapes for name in group})
    frozen = frozenset(tensors if shapes else ()) - set(first.get("buffer_names") or ())
    if shapes:
        trained = _of_zero(files, shapes, with_state)
        if not files.has_parts:
            _check_same_weights(files, first["module"], trained.masters)
    else:
        trained = _of_stage_0(first, tensors, group_names if with_state else None)
    tensors |= trained.masters
    aliases = _tied(first["module"]) | {str(k): str(v) for k, v in (first.get("shared_params") or {}).items()}
    aliases = {name: kept for name, kept in aliases.items() if kept in tensors}
    return Contents(
        folder=files.folder,
        stage=trained.stage,
        world_size=int(first.get("dp_world_size") or len(files.optimizers) or 1),
        tensors={name: stored for name, stored in tensors.items() if name not in aliases},
        aliases=aliases,
        frozen=frozen - aliases.keys(),
        optimizer=trained.state,
        optimizer_class=optimizer_class(first),
        counters={key: int(first.get(key) or 0) for key in COUNTERS},
        lr_scheduler=first.get("lr_scheduler") or {},
        loss_scale=loss_scale(trained.scaler),
        client_state=client_state(first),
    )


def _of_zero(files: Files, shapes: Sequence[Shapes], with_state: bool) -> _Trained:
    if (folder := files.universal) is not None:
        common = universal.common_in(folder)
        state = universal.state_in(folder, shapes, common) if with_state else None
        stage, scaler = int(common.get("zero_stage", 1)), common.get("loss_scaler")
        return _Trained(stage, universal.masters_in(folder, shapes), scaler, state)
    if not files.optimizers:
        raise FileNotFoundError(
            f"'{files.folder}' has no file ..._optim_states.pt, though ZeRO saved it: copy the folder again"
        )
    zero = ZeroFiles(files, shapes)
    return _Trained(zero.stage, zero.masters(), zero.scaler, zero.state() if with_state else None)


def _of_stage_0(first: Mapping[str, Any], tensors: Mapping[str, Stored], group_names: Names | None) -> _Trained:
    """group_names: None: leave masters and state out, of which nobody knows the names."""
    saved = first.get("optimizer")
    if saved is None or group_names is None:
        return _Trained(0, {}, saved, None)
    masters, state = split_optimizer(saved, group_names, {name: stored.shape for name, stored in tensors.items()})
    return _Trained(0, masters, saved, state)


def _tensors(files: Files, models: Sequence[Mapping[str, Any]], trained: Set[str]) -> dict[str, Stored]:
    """What the model files hold beside trained parameters: buffers, then frozen parameters.

    Below stage 3 these are in the state dict, in stage 3 each rank has its part. In stage 0 all parameters are there.
    """
    first = models[0]
    held = {name: whole(value) for name, value in first["module"].items() if isinstance(value, torch.Tensor)}
    buffers = {name: held[name] for name in first.get("buffer_names") or () if name in held}
    if files.has_parts:
        return buffers | frozen_parts(models)
    return buffers | {name: stored for name, stored in held.items() if name not in trained}


def _check_same_weights(files: Files, module: Mapping[str, Any], masters: Mapping[str, Stored]) -> None:
    """Raises ValueError unless the model file's weights, of which a few are read, are the masters, rounded."""
    for name, stored in masters.items():
        weight = module.get(name)
        if not isinstance(weight, torch.Tensor):
            continue
        here = weight.reshape(-1)[:_SAMPLE]
        there = torch.cat([values for _, values in stored.pieces(0, min(_SAMPLE, weight.numel()))] or [here])
        is_same = here.shape == there.shape and here.isclose(there.to(here.dtype), rtol=0, atol=0, equal_nan=True).all()
        if not is_same:
            raise ValueError(
                f"'{files.models[0]}' holds other values of '{name}' than the optimizer files, rounded to "
                f"{weight.dtype}: two checkpoints were mixed; copy the folder again"
            )


def _tied(module: Mapping[str, Any]) -> dict[str, str]:
    """Names of a state dict whose values are the same memory as an earlier one's -> that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, value in module.items():
        if isinstance(value, torch.Tensor) and value.numel():
            kept = first.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), name)
            if kept != name:
                tied[name] = kept
    return tied


def _model_in(path: Path) -> Mapping[str, Any]:
    content = read_pickle(path)
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        raise ValueError(f"'{path}' holds no state dict 'module', so it is no model file of DeepSpeed's")
    return content


def _check_same_step(files: Files, models: Sequence[Mapping[str, Any]]) -> None:
    for path, model in zip(files.models, models, strict=True):
        for key in ("global_steps", "dp_world_size"):
            if model.get(key) != models[0].get(key):
                raise ValueError(
                    f"'{path}' has {key} {model.get(key)}, the file of rank 0 has {models[0].get(key)}: two "
                    "checkpoints were mixed; copy one of them into an empty folder"
                )
    expected = models[0].get("dp_world_size")
    for found in (files.models if files.has_parts else []), files.optimizers:
        if found and isinstance(expected, int) and len(found) != expected:
            raise FileNotFoundError(
                f"'{files.folder}' was saved by {expected} ranks, but holds files {found[0].name} ... of {len(found)}: "
                "some are missing, or two checkpoints were mixed; copy the folder again"
            )
