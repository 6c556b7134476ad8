"""`load_state_dict` of a sharded model: whole tensors in, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zeropg._native import _C
from zeropg.rank_io.agreement import together
from zeropg.sharding.access import full_parameters
from zeropg.sharding.state import state_of


def load_into(model: nn.Module, state_dict: dict[str, Any], strict: bool, load_plain: Callable[..., Any]) -> Any:
    """load_state_dict of a sharded model: torch's own for buffers, checks and reports, then the masters themselves."""
    core: _C.ShardedModule = state_of(model, "load_state_dict").core
    failure: Exception | None = None
    with full_parameters(model, writable=True):
        try:
            result = load_plain(state_dict, strict=strict)
        except Exception as error:
            failure = error

    def check() -> None:
        if failure is not None:
            raise failure

    together(core.process_group, "load_state_dict", check)  # a key may be missing on one rank alone
    core.begin_step()
    try:  # a disk that fails on one rank (masters in a tier) is an error on all
        together(core.process_group, "load_state_dict", lambda: _load_masters(core, state_dict))
    finally:
        core.end_step()
    return result


def _load_masters(core: _C.ShardedModule, state_dict: Mapping[str, Any]) -> None:
    for group in core.flat_groups:
        for slot, (names, parameter, _, _) in enumerate(group.slots):
            value = next((state_dict[name] for name in names if name in state_dict), None)
            if value is not None and value.shape == parameter.shape:
                group.load(slot, value)
