"""DeepSpeed's `runtime.zero`: the places from which scripts import some names."""

from zeropg.deepspeed.runtime.zero import offload_config, partition_parameters

__all__ = ["offload_config", "partition_parameters"]
