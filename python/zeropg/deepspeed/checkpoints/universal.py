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


def state_in(folder: Path, shapes: Sequence[Shapes], param_groups: Sequence[Mapping[str, Any]]) -> SavedState:
    """Returns the optimizer's state. shapes: of each flat group, whose numbers the param groups name."""
    groups: list[SavedGroup] = []
    tensors: dict[str, dict[str, Stored]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for group in param_groups:
        names: list[str] = []
        for name, shape in (item for index in group["params"] for item in shapes[index].items()):
            names.append(name)
            for path in sorted((folder / name).glob("*.pt")):
                if path.stem == _STEP:
                    numbers.setdefault(name, {})[_STEP] = read_pickle(path)
                elif path.stem != _MASTER:
                    tensors.setdefault(name, {})[path.stem] = in_file(path, tuple(shape))
            if "step" in group and name in tensors:
                numbers.setdefault(name, {}).setdefault(_STEP, group["step"])
        options = {key: value for key, value in group.items() if key not in ("params", "step")}
        groups.append(SavedGroup(names, options))
    return SavedState(groups, tensors, numbers)
