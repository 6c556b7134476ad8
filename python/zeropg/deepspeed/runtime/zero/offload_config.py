"""DeepSpeed's `runtime.zero.offload_config`: the names of places and of states."""

from zeropg.deepspeed.state_offload import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
