"""DeepSpeed's `runtime`: the places from which scripts import some names."""

from zeropg.deepspeed.runtime import (
    activation_checkpointing,
    config,
    config_utils,
    dataloader,
    engine,
    lr_schedules,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "config",
    "config_utils",
    "dataloader",
    "engine",
    "lr_schedules",
    "utils",
    "zero",
]
