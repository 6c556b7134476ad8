"""Which engine a parameter belongs to: DeepSpeed's functions are given parameters alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from torch import nn

from zeropg.deepspeed.zero.parameter_attributes import set_attributes
from zeropg.sharding.state import ShardedState

if TYPE_CHECKING:
    from zeropg.deepspeed.engine import DeepSpeedEngine


class Place(NamedTuple):
    """Where a parameter lies: elements [offset, offset + parameter.numel()) of a flat group of its engine's model."""

    engine: DeepSpeedEngine
    state: ShardedState
    group: Any  # _C.FlatGroup
    name: str
    offset: int


# By the parameter's id; an entry goes with its engine.
_ENGINES: WeakValueDictionary[int, DeepSpeedEngine] = WeakValueDictionary()


def register(engine: DeepSpeedEngine) -> None:
    """Lets `place_of` find the engine's parameters, and gives them DeepSpeed's attributes where they are sharded."""
    for parameter in engine.module.parameters():
        _ENGINES[id(parameter)] = engine
    if engine.zero_optimization_partition_weights():
        set_attributes(engine.module)


def place_of(parameter: nn.Parameter) -> Place | None:
    """Returns where an engine keeps a parameter; None for one of no engine's."""
    engine = _ENGINES.get(id(parameter))
    for group in engine._state.core.flat_groups if engine is not None else ():
        for names, known, offset, _ in group.slots:
            if known is parameter:
                assert engine is not None  # or there is no group
                return Place(engine, engine._state, group, names[0], offset)
    return None
