"""How many elements may be whole beyond what runs, where units are gathered: the arguments of `fully_shard`."""

from __future__ import annotations

import sys

from zeropg._native import _C


def limits_of(
    reshard_after_forward: bool,
    prefetch_numel: int,
    keep_numel: int,
    persistent_numel: int,
    max_whole_numel: int | None,
) -> _C.UnitLimits:
    """Raises ValueError for what is no number of elements, and for limits that contradict each other."""
    _check("prefetch_numel", prefetch_numel, "0 to gather nothing ahead")
    _check("keep_numel", keep_numel, "0 to keep nothing for the backward")
    _check("persistent_numel", persistent_numel, "0 to keep no unit whole between steps")
    if max_whole_numel is not None:
        _check("max_whole_numel", max_whole_numel, "None for no limit")
    if not reshard_after_forward and (keep_numel > 0 or max_whole_numel is not None):
        given = "keep_numel" if keep_numel > 0 else "max_whole_numel"
        raise ValueError(
            f"[zeropg] fully_shard: {given} is {keep_numel or max_whole_numel} with reshard_after_forward=False, which "
            "keeps every unit whole for its backward; expected one of the two. keep_numel says how much is kept, "
            "within max_whole_numel, where reshard_after_forward is True."
        )
    return _C.UnitLimits(
        prefetch_numel=min(prefetch_numel, sys.maxsize),
        keep_numel=min(keep_numel, sys.maxsize),
        persistent_numel=min(persistent_numel, sys.maxsize),
        max_whole_numel=sys.maxsize if max_whole_numel is None else min(max_whole_numel, sys.maxsize),
    )


def what_has_no_effect(core: _C.ShardedModule, **limits: int | None) -> str:
    """For the line that says how a model is sharded. `limits`: those that were given."""
    names = [name for name, value in limits.items() if value]
    if not core.fetch_is_collective:
        return f"; {', '.join(names)} changes nothing, since no units are gathered" if names else ""
    bound = limits.get("max_whole_numel")
    root = sum(flat.total_numel for flat in core.flat_groups if not flat.unit_name)
    if bound is None or root < bound:
        return ""
    return (
        f"; max_whole_numel is {bound:,}, and the root, which is always whole, has {root:,} elements: nothing else is "
        "kept or gathered ahead"
    )


def _check(name: str, value: int, nothing: str) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"[zeropg] fully_shard: {name} is {value!r}; expected a number of elements, or {nothing}.")
