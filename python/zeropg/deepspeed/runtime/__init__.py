"""DeepSpeed's `runtime`: the places from which scripts import some names."""

from zeropg.deepspeed.runtime import lr_schedules, utils, zero

__all__ = ["lr_schedules", "utils", "zero"]
