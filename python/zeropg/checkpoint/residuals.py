"""Residuals of gradient compression in checkpoints: each rank's own, in a file of its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from zeropg._native import _C
from zeropg.compression.state import RESULT_HOP


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


def load_residuals(core: _C.ShardedModule, contents: Sequence[dict[str, Any]], former: int) -> None:
    """Takes over what ranks of a world of `former` ranks gave as saved_residuals. Nothing without error feedback.

    Of the same world: this rank's own. Of another one: what several or none of its ranks owed, which goes uncompressed
    into this rank's next gradients.
    """
    store = core.residuals
    if store is None:
        if core.rank == 0 and any(content["residuals"] for content in contents):
            warnings.warn(
                "[zeropg] load_checkpoint: what compression still owed to gradients is dropped, since the model has no "
                "codec; load it with one to have that paid",
                stacklevel=2,
            )
        return
    store.clear()
    for name, hop, start, values in (segment for content in contents for segment in content["residuals"]):
        if former == core.world_size:
            store.load(name, hop, start, values)
            continue
        # Gradients are averaged: what was lost of a sum over fewer ranks weighs more in one over more of them.
        factor = core.world_size if hop == RESULT_HOP else core.world_size / former
        store.owe(name, start, factor * values)
