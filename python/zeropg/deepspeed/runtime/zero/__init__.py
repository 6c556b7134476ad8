"""DeepSpeed's `runtime.zero`: the places from which scripts import some names."""

from zeropg.deepspeed.runtime.zero import config, offload_config, partition_parameters, stage3, stage_1_and_2
from zeropg.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
)
from zeropg.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "config",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unwrap_model_for_generation",
]
