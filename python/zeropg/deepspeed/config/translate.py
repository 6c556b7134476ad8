"""`sharding_arguments`: what a configuration means in the words of `zeropg.fully_shard`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from zeropg.compression.codec import BlockQuant
from zeropg.compression.plan import Plan
from zeropg.deepspeed.config.model import Config
from zeropg.sharding.offload import Offload

_QUANTIZED_WEIGHT_BITS = 8  # as ZeRO++ sends weights
_QUANTIZED_GRADIENT_BITS = 4  # and gradients
_EVERYTHING = sys.maxsize  # elements


def sharding_arguments(config: Config) -> dict[str, Any]:
    """Returns keyword arguments of `zeropg.fully_shard`, without those of which the configuration says nothing."""
    offload_param = config.zero_optimization.offload_param.device
    arguments: dict[str, Any] = {
        "stage": config.zero_optimization.stage,
        "param_dtype": param_dtype(config),
        "reduce_dtype": dtype_of(config.communication_data_type),
        "buffer_dtype": dtype_of(config.data_types.buffer_dtype),
        "offload_params": None if offload_param == "none" else offload_param,
        "offload_optimizer": _offload_optimizer(config),
        "compression": _compression(config),
        "prefetch_numel": _if_given(config, "stage3_prefetch_bucket_size"),
        "keep_numel": _EVERYTHING if config.zero_optimization.zero_hpz_partition_size > 1 else None,
        "persistent_numel": _if_given(config, "stage3_param_persistence_threshold"),
        "max_whole_numel": _if_given(config, "stage3_max_live_parameters"),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def param_dtype(config: Config) -> torch.dtype | None:
    """Returns the dtype that the model computes in; None: its parameters' own."""
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else dtype_of(config.data_types.param_dtype)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Returns the dtype that one of DeepSpeed's names means: "bf16", "float16", "torch.float32", "half"."""
    if name is None:
        return None
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    found = getattr(torch, short.get(name, name.removeprefix("torch.")))
    assert isinstance(found, torch.dtype)  # as the models say
    return found


def _if_given(config: Config, key: str) -> int | None:
    """A number of `zero_optimization`, of which zeropg has a default of its own."""
    block = config.zero_optimization
    return getattr(block, key) if key in block.model_fields_set else None


def _offload_optimizer(config: Config) -> Offload | None:
    block = config.zero_optimization.offload_optimizer
    if block.device == "none":
        return None
    if block.device == "cpu":
        return Offload(device="cpu", pin_memory=block.pin_memory)
    offload = Offload(device="nvme", path=block.nvme_path, pin_memory=block.pin_memory)
    if "intra_op_parallelism" in config.aio.model_fields_set:
        return replace(offload, threads=config.aio.intra_op_parallelism)
    return offload


def _compression(config: Config) -> Plan | None:
    zero = config.zero_optimization
    if not (zero.zero_quantized_gradients or zero.zero_quantized_weights):
        return None
    return Plan(
        gradients=BlockQuant(_QUANTIZED_GRADIENT_BITS) if zero.zero_quantized_gradients else None,
        weights=BlockQuant(_QUANTIZED_WEIGHT_BITS) if zero.zero_quantized_weights else None,
    )
