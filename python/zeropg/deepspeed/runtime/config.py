"""DeepSpeed's `runtime.config`: what a configuration says, under the attributes of its `DeepSpeedConfig`."""

from __future__ import annotations

import json
import os
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from zeropg.deepspeed.config import Config, read
from zeropg.deepspeed.config.error import ConfigError as DeepSpeedConfigError
from zeropg.deepspeed.config.names import ALIASES
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.config.translate import dtype_of
from zeropg.deepspeed.utils.logging import logger

# Attributes that are called as their keys are.
_SAME = (
    "dataloader_drop_last",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "prescale_gradients",
    "steps_per_print",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
# Others, and the keys or blocks that they are.
_RENAMED = {
    "activation_checkpointing_config": "activation_checkpointing",
    "bfloat16_config": "bf16",
    "bfloat16_enabled": "bf16.enabled",
    "buffer_dtype": "data_types.buffer_dtype",
    "float16_config": "fp16",
    "flops_profiler_config": "flops_profiler",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "keep_in_fp32_modules": "data_types.keep_in_fp32_modules",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "loss_scale": "fp16.loss_scale",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "optimizer_name": "optimizer.type",
    "param_dtype": "data_types.param_dtype",
    "scheduler_name": "scheduler.type",
    "timers_config": "timers.throughput",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_optimization_stage": "zero_optimization.stage",
}
# Optimizers that DeepSpeed calls by their names in lower case.
_OWN_OPTIMIZERS = {"adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon"}
_MONITORS = ("tensorboard", "comet", "wandb", "csv_monitor")
_OFFLOADS = ("offload_param", "offload_optimizer")


class DeepSpeedConfig:
    """DeepSpeed's attributes of a configuration, read and checked as `initialize` does; it does not communicate.

    `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` are complete, `zero_enabled`,
    `zero_optimization_stage`, `zero_config`, `float16_config` (`fp16_enabled`), `bfloat16_config` (`bfloat16_enabled`),
    `optimizer_name`, `optimizer_params` and so on say what DeepSpeed's do. They are for reading: give `initialize` the
    configuration itself.

    Args:
        config: a path of a JSON file, JSON in URL-safe base64, or a dictionary.
        mpu: an object with get_data_parallel_world_size(), or else get_sequence_parallel_world_size().
        mesh_device: a DeviceMesh with a dimension "data_parallel". Without either batches are divided among the ranks
            of the world, or are this process's alone where there is no process group.

    Raises ConfigError, a ValueError, with a line for each key that is unknown, refused, "auto" or in conflict.
    """

    def __init__(
        self, config: str | os.PathLike[str] | dict[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        self._param_dict = load(config)  # type: ignore[arg-type]  # it says what it takes
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = _ranks(mpu, mesh_device)
        vars(self).update(_attributes(read(self._param_dict, world_size=self.world_size)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"[zeropg] DeepSpeedConfig.{name} is not available; zeropg.deepspeed.config.read(config, world_size=...) "
            "has all keys of the configuration under their own names"
        )

    def print_user_config(self) -> None:
        """Logs the configuration as it was given."""
        logger.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=str))

    def print(self, name: str) -> None:
        """Logs all attributes under a heading, and the configuration as it was given."""
        logger.info("%s:", name)
        for key, value in sorted(vars(self).items()):
            if not key.startswith("_"):
                logger.info("  %s %s %s", key, "." * (29 - len(key)), value)
        self.print_user_config()


def _ranks(mpu: Any, mesh_device: Any) -> int:
    """Among how many ranks batches are divided."""
    if hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if mpu is not None:
        return world_size // int(mpu.get_sequence_parallel_world_size())
    return world_size if mesh_device is None else int(mesh_device.get_group("data_parallel").size())


def _attributes(config: Config) -> dict[str, Any]:
    autocast, validation = config.torch_autocast, config.checkpoint.tag_validation
    said = {name: getattr(config, name) for name in _SAME}
    said |= {name: reduce(getattr, path.split("."), config) for name, path in _RENAMED.items()}
    if str(said["optimizer_name"]).lower() in _OWN_OPTIMIZERS:
        said["optimizer_name"] = said["optimizer_name"].lower()
    return said | {
        "aio_config": config.aio.model_dump(),
        "checkpoint_config": SimpleNamespace(
            tag_validation=validation,
            checkpoint_serialization=config.checkpoint.checkpoint_serialization,
            writer=_given(config.checkpoint, "writer"),
        ),
        "checkpoint_tag_validation_enabled": validation != "IGNORE",
        "checkpoint_tag_validation_fail": validation == "FAIL",
        "comms_config": _comms(config),
        "communication_data_type": dtype_of(config.communication_data_type),
        "data_efficiency_enabled": False,
        "monitor_config": _monitors(config),
        "optimizer_params": _given(config.optimizer, "params"),
        "scheduler_params": _given(config.scheduler, "params"),
        "seq_parallel_communication_data_type": dtype_of(config.seq_parallel_communication_data_type),
        "torch_autocast_dtype": dtype_of(autocast.dtype),
        "wall_clock_breakdown": config.wall_clock_breakdown or config.flops_profiler.enabled,
        "zero_config": _zero(config),
        "zero_enabled": config.zero_optimization.stage > 0,
    }


def _given(block: Any, key: str) -> Any:
    """None where the configuration does not say it."""
    return getattr(block, key) if key in block.model_fields_set else None


def _zero(config: Config) -> SimpleNamespace:
    """`zero_optimization` as DeepSpeed has it after reading: without `stage3_`, and None for offload that is not
    there."""
    block = config.zero_optimization
    short = {long: name for name, long in ALIASES.items()}
    found = {short.get(name, name): getattr(block, name) for name in type(block).model_fields}
    found |= {name: _given(block, name) for name in _OFFLOADS}
    if block.overlap_comm is None:
        found["overlap_comm"] = block.stage == 3
    return SimpleNamespace(**found)


def _monitors(config: Config) -> SimpleNamespace:
    blocks = {name: getattr(config, name) for name in _MONITORS}
    return SimpleNamespace(enabled=any(block.enabled for block in blocks.values()), **blocks)


def _comms(config: Config) -> SimpleNamespace:
    """comms_logger_enabled: whether the block is there, as in DeepSpeed; its own `enabled` says whether it acts."""
    is_there = "comms_logger" in config.model_fields_set
    more = {"comms_logger": config.comms_logger} if is_there else {}
    return SimpleNamespace(comms_logger_enabled=is_there, **more)


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
