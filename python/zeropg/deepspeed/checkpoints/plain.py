"""Stage 0: one model file, with the whole state of a plain or a 16-bit optimizer, which knows no names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeropg.deepspeed.checkpoints.contents import SavedGroup, SavedState
from zeropg.deepspeed.checkpoints.partitions import Shapes, split_flat
from zeropg.deepspeed.checkpoints.stored import Runs, Stored

Names = Sequence[Sequence[str]]  # of each param group, in its order


def split_optimizer(saved: Mapping[str, Any], names: Names, shapes: Shapes) -> tuple[dict[str, Stored], SavedState]:
    """Returns the fp32 masters, where there are any beside the model's own weights, and the optimizer's state.

    Parameters are told by their places: `names` has to be of the groups that the optimizer was made with. In its state
    each place is a parameter, or a group that lies in one flat tensor.

    Raises ValueError where places or sizes differ.
    """
    inner = saved.get("optimizer_state_dict", saved)
    flats = saved.get("fp32_groups_flat")
    if missing := [name for own in names for name in own if name not in shapes]:
        raise ValueError(f"the checkpoint is of another model; not in the checkpoint: {', '.join(missing[:5])}")
    _check_groups(inner["param_groups"], names, is_flat=flats is not None)
    masters: dict[str, Stored] = {}
    tensors: dict[str, dict[str, Stored]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for position, (group, own) in enumerate(zip(inner["param_groups"], names, strict=True)):
        places = [own] if flats is not None else [[name] for name in own]
        held = [flats[position]] if flats is not None else saved.get("fp32_groups", {position: ()})[position]
        for place, value in zip(places, held, strict=False):
            masters.update(_split(value, place, shapes))
        for index, place in zip(group["params"], places, strict=True):
            state = inner["state"].get(index, {})
            counted = {"step": group["step"]} if state and "step" in group else {}  # FusedAdam counts per group
            for key, value in {**counted, **state}.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    for name, runs in _split(value, place, shapes).items():
                        tensors.setdefault(name, {})[key] = runs
                elif value is not None:
                    for name in place:
                        numbers.setdefault(name, {})[key] = value
    return masters, SavedState(_groups(inner["param_groups"], names), tensors, numbers)


def _groups(saved: Sequence[Mapping[str, Any]], names: Names) -> list[SavedGroup]:
    hidden = ("params", "step")
    return [
        SavedGroup(list(own), {key: value for key, value in group.items() if key not in hidden})
        for group, own in zip(saved, names, strict=True)
    ]


def _split(flat: torch.Tensor, names: Sequence[str], shapes: Shapes) -> dict[str, Runs]:
    return split_flat([flat.detach().reshape(-1)], {name: shapes[name] for name in names}, [0] * len(names))


def _check_groups(saved: Sequence[Mapping[str, Any]], names: Names, *, is_flat: bool) -> None:
    there = [len(group["params"]) for group in saved]
    here = [1 if is_flat else len(own) for own in names]
    if there != here:
        raise ValueError(
            f"the optimizer was saved with {len(there)} param groups of {there} tensors, yours has {len(here)} of "
            f"{here}; make it with the groups that it was saved with"
        )
