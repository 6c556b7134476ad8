"""DeepSpeed's `runtime.zero.partition_parameters`: parameters that are sharded, and whole ones."""

from zeropg.deepspeed.zero.gathered_parameters import GatheredParameters, register_external_parameter
from zeropg.deepspeed.zero.init import Init
from zeropg.deepspeed.zero.parameter_attributes import ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
