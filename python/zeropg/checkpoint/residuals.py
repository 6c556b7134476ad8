"""Residuals of gradient compression in checkpoints: each rank's own, in a file of its own."""

from __future__ import annotations

from typing import Any

from zeropg._native import _C


def residual_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"residuals-{rank:05d}.safetensors"


def is_residual_file(name: str) -> bool:
    return name.startswith("residuals-")


def saved_residuals(core: _C.ShardedModule) -> dict[str, Any] | None:
    """What `make_structure_file` takes of this rank's residuals; None where there are none."""
    store = core.residuals
    segments = [] if store is None else store.segments()
    if not segments:
        return None
    return {"residuals": [list(segment) for segment in segments]}


def load_residuals(core: _C.ShardedModule, content: dict[str, Any] | None) -> None:
    """Takes over what `saved_residuals` gave; None: begins with none. Nothing without error feedback."""
    store = core.residuals
    if store is None:
        return
    store.clear()
    for name, hop, start, values in [] if content is None else content["residuals"]:
        store.load(name, hop, start, values)
