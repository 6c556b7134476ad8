"""The optimizers of a checkpoint by name: one, a sequence, or a dict of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from zeropg.checkpoint.manifest import ALONE
from zeropg.optim.shard_optimizer import ShardedOptimizer

# What callers may give as `optimizer`.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def named_optimizers(given: Optimizers | None, model: nn.Module, operation: str) -> dict[str, ShardedOptimizer]:
    """Returns the optimizers by name: those of a sequence by "0", "1", ..., of which a single one has no name.

    Raises TypeError for what shard_optimizer has not returned, ValueError for another model's, for one that is given
    twice, and for a name that is empty.
    """
    if given is None:
        return {}
    entries: dict[str, object]
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"[zeropg] {operation}: an optimizer is called {name!r}; expected a str as name")
            if name == ALONE:
                raise ValueError(f"[zeropg] {operation}: an optimizer has the empty name; give it another")
        entries = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        entries = {str(index): entry for index, entry in enumerate(given)} if len(given) != 1 else {ALONE: given[0]}
    else:
        entries = {ALONE: given}
    named: dict[str, ShardedOptimizer] = {}
    for name, optimizer in entries.items():
        if not isinstance(optimizer, ShardedOptimizer):
            which = f" as optimizer {name!r}" if name else ""
            raise TypeError(
                f"[zeropg] {operation}: got a {type(optimizer).__name__}{which}, expected what zeropg.shard_optimizer "
                "returned"
            )
        if optimizer._model is not model:
            raise ValueError(
                f"[zeropg] {operation}: the optimizer{own_words(name)} was sharded for another model; pass that "
                "model's own"
            )
        for other, before in named.items():
            if before is optimizer:
                raise ValueError(f"[zeropg] {operation}: optimizers {other!r} and {name!r} are the same one")
        named[name] = optimizer
    return named


def own_words(name: str) -> str:
    """What follows "the optimizer" in a message."""
    return f" {name!r}" if name != ALONE else ""


def check_same_names(saved: Iterable[str], given: Iterable[str]) -> None:
    """Raises ValueError where a checkpoint's optimizers have other names than those that were given."""
    saved, given = list(saved), list(given)
    if set(saved) != set(given):
        raise ValueError(
            f"the checkpoint holds {_described(saved)}, you gave {_described(given)}; give the same number under the "
            "same names (a sequence's are '0', '1', ...), or optimizer=None to load the model alone"
        )


def _described(names: Sequence[str]) -> str:
    if list(names) == [ALONE]:
        return "one optimizer"
    return f"{len(names)} optimizers ({', '.join(map(repr, names))})" if len(names) > 1 else f"optimizer {names[0]!r}"
