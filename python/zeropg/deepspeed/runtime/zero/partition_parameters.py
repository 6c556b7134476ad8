"""DeepSpeed's `runtime.zero.partition_parameters`: parameters that are sharded, and whole ones."""

import enum

from zeropg.deepspeed.zero.gathered_parameters import GatheredParameters
from zeropg.deepspeed.zero.init import Init


class ZeroParamStatus(enum.Enum):
    """What DeepSpeed's `parameter.ds_status` is. Parameters of zeropg have none: ask `zeropg.deepspeed.utils` for their
    values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]
