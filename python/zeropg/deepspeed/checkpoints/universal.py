"""Universal checkpoints: a folder for each parameter, with a file for its master and one for each key of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeropg.deepspeed.checkpoints.contents import SavedGroup, SavedState
from zeropg.deepspeed.checkpoints.partitions import Shapes
from zeropg.deepspeed.checkpoints.pickles import read_pickle
from zeropg.deepspeed.checkpoints.stored import Stored, in_file

_MASTER, _STEP, _COMMON = "fp32", "step", "optimizer_state.pt"


def masters_in(folder: Path, shapes: Sequence[Shapes]) -> dict[str, Stored]:
    """Returns the fp32 parameters. Raises FileNotFoundError for one without a file."""
    shape_of = {name: tuple(shape) for group in shapes for name, shape in group.items()}
    return {name: in_file(folder / name / f"{_MASTER}.pt", shape) for name, shape in shape_of.items()}


def common_in(folder: Path) -> Mapping[str, Any]:
    """Returns what the ranks' optimizer files had in common."""
    content = read_pickle(folder / _COMMON)
    if not isinstance(content, dict) or not isinstance(content.get("param_groups"), list):
        raise ValueError(f"'{folder / _COMMON}' holds no param_groups: convert the checkpoint again")
    return content


def state_in(folder: Path, shapes: Sequence[Shapes], common: Mapping[str, Any]) -> SavedState:
    """Returns the optimizer's state.

    shapes: of each flat group, whose numbers the param groups name. common: of `common_in`.
    """
    groups: list[SavedGroup] = []
    tensors: dict[str, dict[str, Stored]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for group in common["param_groups"]:
        names: list[str] = []
        of_group = ((index, *item) for index in group["params"] for item in shapes[index].items())
        for index, name, shape in of_group:
            names.append(name)
            for path in sorted((folder / name).glob("*.pt")):
                if path.stem == _STEP:
                    numbers.setdefault(name, {})[_STEP] = read_pickle(path)
                elif path.stem != _MASTER:
                    tensors.setdefault(name, {})[path.stem] = in_file(path, tuple(shape))
            if name in tensors and (step := _common_step(common, group, index)) is not None:
                numbers.setdefault(name, {}).setdefault(_STEP, step)
        options = {key: value for key, value in group.items() if key not in ("params", "step")}
        groups.append(SavedGroup(names, options))
    return SavedState(groups, tensors, numbers)


def _common_step(common: Mapping[str, Any], group: Mapping[str, Any], index: int) -> Any:
    """Of stage 3, whose conversion writes no files for steps: FusedAdam counts per group, torch's per tensor."""
    state = (common.get("optimizer_state_dict") or {}).get("state") or {}
    return state.get(index, {}).get(_STEP, group.get(_STEP))
