"""Which stored tensor and which stored param group is which of the model's. No communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from zeropg.checkpoint.plan import ModelPlan

_LISTED = 5  # names in an error; the rest is counted


class Described(Protocol):
    """A stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def match_tensors(
    stored: Mapping[str, Described],
    aliases: Mapping[str, str],
    plan: ModelPlan,
    *,
    strict: bool = True,
    may_miss: Collection[str] = (),
    are_equal: Callable[[str, str], bool] = lambda name, other: False,
) -> dict[int, str]:
    """Returns the stored name of each tensor of the model, by its index in the plan.

    Args:
        aliases: other names of stored tensors.
        strict: False: tensors may be missing on either side.
        may_miss: names of tensors that may be missing in `stored` all the same.
        are_equal: whether two stored tensors, which are one tensor here, have the same values.

    Raises ValueError listing what differs.
    """
    may_miss = frozenset(may_miss)
    names_of: dict[int, list[str]] = {}
    for name, index in plan.index_of.items():
        names_of.setdefault(index, []).append(name)
    found: dict[int, str] = {}
    used: set[str] = set()
    missing, misshapen, untied = [], [], []
    for index, tensor in enumerate(plan.tensors):
        known = [aliases.get(name, name) for name in names_of[index]]
        stored_name = next((name for name in known if name in stored), None)
        if stored_name is None:
            if not any(name in may_miss for name in names_of[index]):
                missing.append(tensor.name)
            continue
        one = stored[stored_name]
        used.update(known)
        if one.shape != tuple(tensor.value.shape) or one.dtype.is_floating_point != tensor.dtype.is_floating_point:
            misshapen.append(
                f"{tensor.name} ({one.dtype} {list(one.shape)}, here {tensor.dtype} {list(tensor.value.shape)})"
            )
        found[index] = stored_name
        others = [name for name in dict.fromkeys(known) if name in stored and name != stored_name]
        untied += [f"{name} and {stored_name}" for name in others if not are_equal(name, stored_name)]
    unexpected = [name for name in stored if name not in used]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("not in the checkpoint", missing if strict else []),
            ("not in the model", unexpected if strict else []),
            ("of another shape or kind", misshapen),
            ("one tied tensor in the model, two with other values in the checkpoint", untied),
        )
        if names
    ]
    if problems:
        raise ValueError(f"the checkpoint is of another model; {'; '.join(problems)}")
    return found


def check_groups(which: str, saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> None:
    """Raises ValueError where an optimizer's param groups hold other parameters than the saved ones.

    which: "the checkpoint's optimizer", as messages call it.
    """
    if len(here) != len(saved):
        raise ValueError(f"{which} has {len(saved)} param groups, yours {len(here)}")
    for index, (names, saved_names) in enumerate(zip(here, saved, strict=True)):
        theirs = set(saved_names)
        only_here, only_there = [n for n in names if n not in theirs], sorted(theirs - set(names))
        if only_here or only_there:
            raise ValueError(
                f"param group {index} holds other parameters than that of {which}; only here: {listed(only_here)}; "
                f"only there: {listed(only_there)}"
            )


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more
