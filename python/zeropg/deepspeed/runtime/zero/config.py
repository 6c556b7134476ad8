"""DeepSpeed's `runtime.zero.config`: the names of stages."""

from enum import IntEnum


class ZeroStageEnum(IntEnum):
    """The stages; `max_stage` is the last one."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


__all__ = ["ZeroStageEnum"]
