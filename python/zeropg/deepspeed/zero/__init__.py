"""DeepSpeed's `zero`: building sharded models, whole parameters, and how much memory training takes."""

from zeropg.deepspeed.state_offload import OffloadDeviceEnum, OffloadStateTypeEnum
from zeropg.deepspeed.zero.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zeropg.deepspeed.zero.gathered_parameters import (
    GatheredParameters,
    register_external_parameter,
    unwrap_model_for_generation,
)
from zeropg.deepspeed.zero.init import Init
from zeropg.deepspeed.zero.parameter_attributes import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroParamStatus",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unwrap_model_for_generation",
]
