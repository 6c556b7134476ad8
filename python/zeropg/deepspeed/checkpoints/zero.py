"""Stages 1, 2 and 3: masters and optimizer state in flat partitions, a file for each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeropg.deepspeed.checkpoints.contents import SavedGroup, SavedState
from zeropg.deepspeed.checkpoints.folder import Files
from zeropg.deepspeed.checkpoints.partitions import Shapes, split_each, split_flat
from zeropg.deepspeed.checkpoints.pickles import read_pickle
from zeropg.deepspeed.checkpoints.stored import Runs, Stored

Split = Callable[[int, Sequence[torch.Tensor]], dict[str, Runs]]  # (flat group, its partitions by rank)


class ZeroFiles:
    """The optimizer files of all ranks, checked against each other.

    Raises ValueError where they are not of one checkpoint.
    """

    def __init__(self, files: Files, shapes: Sequence[Shapes]) -> None:
        self._files = files
        self._shapes = shapes
        self._saved = [_optimizer_in(path) for path in files.optimizers]
        self.stage = int(self._same("zero_stage", lambda saved: saved.get("zero_stage", 1)))
        counts = self._same("partition_count", lambda saved: _flat(saved.get("partition_count")))
        if max(counts, default=0) != len(self._saved):
            raise ValueError(
                f"'{files.folder}' holds optimizer files of {len(self._saved)} ranks, but they say that "
                f"{max(counts, default=0)} ranks saved: some are missing, or two checkpoints were mixed"
            )
        if (self.stage == 3) != files.has_parts:
            raise ValueError(
                f"'{files.optimizers[0]}' is of stage {self.stage}, but the model files in its folder are not: two "
                "checkpoints were mixed; copy one of them into an empty folder"
            )

    @property
    def scaler(self) -> Any:
        return self._saved[0].get("loss_scaler")

    def masters(self) -> dict[str, Stored]:
        """Returns the fp32 parameters that the optimizer holds."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        groups = [_list_in(saved, key, path) for saved, path in zip(self._saved, self._files.optimizers, strict=True)]
        if any(len(each) != len(self._shapes) for each in groups):
            raise ValueError(
                f"'{self._files.folder}': the model file has {len(self._shapes)} groups of parameters, the ranks' "
                f"optimizer files have {sorted({len(each) for each in groups})}: they are not of one checkpoint"
            )
        masters: dict[str, Stored] = {}
        for index in range(len(self._shapes)):
            masters.update(self._split(index, [each[index] for each in groups]))
        return masters

    def state(self) -> SavedState:
        """Returns the optimizer's state per element, its numbers and its param groups."""
        inner = [_state_in(saved, self.stage == 3) for saved in self._saved]
        self._same("param_groups", lambda saved: repr(_state_in(saved, self.stage == 3)["param_groups"]))
        groups: list[SavedGroup] = []
        tensors: dict[str, dict[str, Stored]] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for group in inner[0]["param_groups"]:
            names: list[str] = []
            for index in group["params"]:
                shapes = self._shapes[index]
                names += shapes
                by_rank = [each["state"].get(index, {}) for each in inner]
                for key in dict.fromkeys(key for each in by_rank for key in each):
                    self._add(index, key, [each.get(key) for each in by_rank], tensors, numbers)
            options = {key: value for key, value in group.items() if key not in ("params", "step")}
            groups.append(SavedGroup(names, options))
            if "step" in group:  # FusedAdam counts per group
                for name in names:
                    if name in tensors:
                        numbers.setdefault(name, {}).setdefault("step", group["step"])
        return SavedState(groups, tensors, numbers)

    def _add(
        self,
        index: int,
        key: str,
        values: list[Any],
        tensors: dict[str, dict[str, Stored]],
        numbers: dict[str, dict[str, Any]],
    ) -> None:
        """Adds one key of a flat group's state."""
        flat = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
        if flat:
            if len(flat) != len(values):
                raise ValueError(f"'{self._files.folder}': only some ranks' files hold the optimizer's {key!r}")
            for name, runs in self._split(index, flat).items():
                tensors.setdefault(name, {})[key] = runs
            return
        found = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        if any(value != found[0] for value in found):
            raise ValueError(
                f"'{self._files.folder}': the optimizer's {key!r} is {found} on the ranks, so their files are of "
                "different steps: copy the folder again"
            )
        if found[0] is not None:
            for name in self._shapes[index]:
                numbers.setdefault(name, {})[key] = values[0]

    def _split(self, index: int, partitions: Sequence[torch.Tensor]) -> dict[str, Runs]:
        shapes = self._shapes[index]
        flat = [partition.detach().reshape(-1) for partition in partitions]
        try:
            if self.stage == 3:
                return split_each(flat, shapes)
            paddings = self._saved[0].get("param_alignment_paddings")
            return split_flat(flat, shapes, [0] * len(shapes) if paddings is None else paddings[index])
        except (ValueError, IndexError) as error:
            raise ValueError(f"'{self._files.folder}': {error}") from error

    def _same(self, what: str, get: Callable[[Mapping[str, Any]], Any]) -> Any:
        found = [get(saved) for saved in self._saved]
        for path, value in zip(self._files.optimizers, found, strict=True):
            if value != found[0]:
                raise ValueError(
                    f"'{path}' has {what} {value}, the file of rank 0 has {found[0]}: two checkpoints were mixed; copy "
                    "one of them into an empty folder"
                )
        return found[0]


def shapes_in(model_file: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Returns the names and shapes of each flat group, in the order in which they lie."""
    groups = model_file.get("param_shapes") or []
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def frozen_parts(model_files: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """Stage 3: returns the frozen parameters, of which each rank's model file holds a part."""
    frozen: dict[str, Stored] = {}
    for name, shape in (model_files[0].get("frozen_param_shapes") or {}).items():
        parts = [(file.get("frozen_param_fragments") or {}).get(name) for file in model_files]
        held = [part.reshape(-1) for part in parts if isinstance(part, torch.Tensor)]
        if len(held) == len(parts):
            frozen.update(split_each(held, {name: tuple(shape)}))
        elif math.prod(shape):
            raise ValueError(f"only some ranks' model files hold their part of the frozen '{name}'")
    return frozen


def _optimizer_in(path: Any) -> dict[str, Any]:
    content = read_pickle(path)
    saved = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(saved, dict):
        raise ValueError(f"'{path}' holds no optimizer_state_dict, so it is no file of ZeRO")
    return saved


def _flat(count: Any) -> list[int]:
    return [int(each) for each in count] if isinstance(count, (list, tuple)) else [int(count or 0)]


def _list_in(saved: Mapping[str, Any], key: str, path: Any) -> list[torch.Tensor]:
    values = saved.get(key)
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError(f"'{path}' holds no list of tensors {key!r}")
    return list(values)


def _state_in(saved: Mapping[str, Any], is_stage_3: bool) -> dict[str, Any]:
    """The base optimizer's state dict; of an elastic checkpoint, which has a list of states, made from that."""
    inner = saved.get("optimizer_state_dict" if is_stage_3 else "base_optimizer_state")
    if isinstance(inner, list):
        step = {"step": saved["base_optimizer_state_step"]} if "base_optimizer_state_step" in saved else {}
        groups = [{"params": [index], **step} for index in range(len(inner))]
        return {"state": dict(enumerate(inner)), "param_groups": groups}
    if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
        raise ValueError("a rank's optimizer file holds no state of an optimizer")
    return inner
