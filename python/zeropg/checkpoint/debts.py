"""What optimizers that average momenta keep on each rank alone, in checkpoints: in a file of each rank's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeropg.compression.state import ARREARS_HOP, RESULT_HOP
from zeropg.optim.shard_optimizer import ShardedOptimizer


def debt_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"debts-{rank:05d}.safetensors"


def is_debt_file(name: str) -> bool:
    return name.startswith("debts-")


def saved_debts(optimizers: Mapping[str, ShardedOptimizer]) -> dict[str, Any] | None:
    """What `make_structure_file` takes of this rank's; None where there is nothing."""
    debts = {name: own for name, optimizer in optimizers.items() if (own := optimizer.own_state())}
    return {"debts": debts} if debts else None


def load_debts(optimizer: ShardedOptimizer, saved: Sequence[Mapping[str, Any]], former: int) -> None:
    """Takes over what ranks of a world of `former` ranks gave as their optimizer's `own_state`.

    Of the same world: this rank's own. Of another one: what several or none of its ranks owed; momenta that were
    each rank's own begin anew then.
    """
    if former == optimizer._core.world_size:
        optimizer.load_own_state(saved[0] if saved else {})
        return
    owed = [
        (name, ARREARS_HOP, start, values * (former if hop == RESULT_HOP else 1))
        for own in saved
        for name, hop, start, values in own["debts"]["residuals"]
    ]
    optimizer.load_own_state({"debts": {"residuals": owed, "world_size": former}} if owed else {})
