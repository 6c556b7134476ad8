"""DeepSpeed's `runtime`: the places from which scripts import some names."""

from zeropg.deepspeed.runtime import config, config_utils, lr_schedules, utils, zero

__all__ = ["config", "config_utils", "lr_schedules", "utils", "zero"]
