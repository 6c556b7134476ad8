"""Ranks that share layers get the same gradients of what each of them has whole: checked at every update."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zeropg.rank_io.agreement import gather_rows, peers_needed
from zeropg.sharding.state import ShardedState
from zeropg.tensor_parallel.distributed import is_distributed

# Of a parameter's sum of squares. Where ranks compute the same, a device's atomic additions and other cuts of a sum are
# all that differs; another dropout or a sum that is missing changes the first digit.
_TOLERANCE = 1e-3
# Of the sum of squares of all gradients: less is rounding, of gradients that are zero, which a device rounds anew.
_NOISE = 1e-8


class SameGradients:
    """Compares gradients of plain parameters among the ranks that share a model's layers."""

    def __init__(self, state: ShardedState, sharing: dist.ProcessGroup) -> None:
        """sharing: the ranks that share layers with this one."""
        self._state = state
        self._place = sharing.rank()

    def check(self) -> None:
        """Raises RuntimeError on every rank for a gradient that is another one elsewhere; before clipping. Collective.

        Gradients that are not finite are left to the loss scale.
        """
        names = self._names()
        if not names:
            return
        everybody = self._state.parallel.everybody
        own = self._squares(names)
        with peers_needed(everybody, "step"):
            rows = gather_rows(everybody, own)
        # Slices of ranks with data of their own, added up: [ranks that share layers, parameters].
        totals = torch.zeros(int(rows[:, -1].max()) + 1, len(names), dtype=torch.float64)
        totals.index_add_(0, rows[:, -1].long(), rows[:, :-1])
        least, most = totals.min(dim=0).values, totals.max(dim=0).values
        differs = (most - least > _TOLERANCE * most) & (most > _NOISE * most.sum()) & totals.isfinite().all(dim=0)
        if differs.any():
            first = int(differs.nonzero()[0])
            norms = ", ".join(f"{math.sqrt(total):.4g}" for total in totals[:, first].tolist())
            raise RuntimeError(
                f"[zeropg rank {dist.get_rank()}/{dist.get_world_size()}] step: ranks that share the model's layers "
                f"(tensor_parallel) have other gradients of {names[first]!r}, which each of them has whole (norms "
                f"{norms}; {int(differs.sum())} of {len(names)} parameters differ). They computed with other "
                "inputs or other random numbers (dropout: seed them alike), or the plan lacks "
                "replicated_with_grad_allreduce for that module"
            )

    def _names(self) -> list[str]:
        return [
            names[0]
            for group in self._state.core.flat_groups
            if group.is_trainable
            for names, parameter, *_ in group.slots
            if not is_distributed(parameter)
        ]

    def _squares(self, names: list[str]) -> torch.Tensor:
        """The sum of squares of this rank's slice of each gradient; last, its place among those it shares with."""
        places = {name: place for place, name in enumerate(names)}
        filled: list[int] = []
        squares: list[torch.Tensor] = []
        for group in self._state.core.flat_groups:
            gradient = group.grad() if group.is_trainable else None
            if gradient is None:
                continue
            for name, first, start, stop in group.local_shards:
                if name in places:
                    slice_of = gradient[first : first + stop - start]
                    filled.append(places[name])
                    squares.append(torch.linalg.vector_norm(slice_of, dtype=torch.float64).square())
        row = torch.zeros(len(names) + 1, dtype=torch.float64)
        if squares:
            row[filled] = torch.stack(squares).cpu()
        row[-1] = self._place
        return row
