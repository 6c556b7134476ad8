"""Calls of DeepSpeed's engine that answer one key of the configuration, under its names.

They return what the configuration says, or its default; `python -m zeropg config` says which keys act here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from zeropg.deepspeed.config import Config


def _key(path: str) -> Callable[[Any], Any]:
    def read(self: ConfiguredEngine) -> Any:
        return reduce(getattr, path.split("."), self._config)

    read.__doc__ = f"Returns `{path}` of the configuration."
    return read


def _never(what: str) -> Callable[[Any], bool]:
    def read(self: ConfiguredEngine) -> bool:
        return False

    read.__doc__ = f"False: there is no {what}."
    return read


class ConfiguredEngine:
    """The part of DeepSpeedEngine that answers keys which nothing else here asks for."""

    _config: Config

    aio_config = _key("aio")
    autotp_size = _key("tensor_parallel.autotp_size")
    tensor_parallel_config = _key("tensor_parallel")
    swap_tensor_config = _key("aio")
    dump_state = _key("dump_state")
    log_level = _key("log_level")
    memory_breakdown = _key("memory_breakdown")
    wall_clock_breakdown = _key("wall_clock_breakdown")
    optimizer_legacy_fusion = _key("optimizer.legacy_fusion")
    gradient_predivide_factor = _key("gradient_predivide_factor")
    load_universal_checkpoint = _key("checkpoint.load_universal")
    use_node_local_storage = _key("checkpoint.use_node_local_storage")
    checkpoint_serialization_enabled = _key("checkpoint.checkpoint_serialization")

    flops_profiler_enabled = _key("flops_profiler.enabled")
    flops_profiler_recompute_fwd_factor = _key("flops_profiler.recompute_fwd_factor")
    flops_profiler_profile_step = _key("flops_profiler.profile_step")
    flops_profiler_module_depth = _key("flops_profiler.module_depth")
    flops_profiler_top_modules = _key("flops_profiler.top_modules")
    flops_profiler_detailed = _key("flops_profiler.detailed")
    flops_profiler_output_file = _key("flops_profiler.output_file")

    fp16_auto_cast = _key("fp16.auto_cast")
    fp16_master_weights_and_gradients = _key("fp16.fp16_master_weights_and_grads")
    bf16_master_weights_and_gradients = _key("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _key("bf16.bf16_optimizer_states")
    torch_autocast_enabled = _key("torch_autocast.enabled")
    torch_autocast_lower_precision_safe_modules = _key("torch_autocast.lower_precision_safe_modules")

    super_offload = _key("zero_optimization.offload_optimizer.super_offload")
    cpuadam_cores_perc = _key("zero_optimization.offload_optimizer.cpuadam_cores_perc")
    zero_partial_offload = _key("zero_optimization.offload_optimizer.ratio")
    zero_offload_optimizer = _key("zero_optimization.offload_optimizer")
    zero_offload_param = _key("zero_optimization.offload_param")
    zenflow_config = _key("zero_optimization.zenflow")

    zero_allgather_bucket_size = _key("zero_optimization.allgather_bucket_size")
    zero_allgather_partitions = _key("zero_optimization.allgather_partitions")
    zero_allgather_sequential = _key("zero_optimization.stage3_allgather_sequential")
    zero_allow_untested_optimizer = _key("zero_allow_untested_optimizer")
    zero_compute_grad_norm = _key("zero_optimization.compute_grad_norm")
    zero_contiguous_gradients = _key("zero_optimization.contiguous_gradients")
    zero_elastic_checkpoint = _key("zero_optimization.elastic_checkpoint")
    zero_force_ds_cpu_optimizer = _key("zero_force_ds_cpu_optimizer")
    zero_hpz_partition_size = _key("zero_optimization.zero_hpz_partition_size")
    zero_ignore_unused_parameters = _key("zero_optimization.ignore_unused_parameters")
    zero_legacy_stage1 = _key("zero_optimization.legacy_stage1")
    zero_load_from_fp32_weights = _key("zero_optimization.load_from_fp32_weights")
    zero_log_trace_cache_warnings = _key("zero_optimization.log_trace_cache_warnings")
    zero_max_live_parameters = _key("zero_optimization.stage3_max_live_parameters")
    zero_max_reuse_distance = _key("zero_optimization.stage3_max_reuse_distance")
    zero_model_persistence_threshold = _key("zero_optimization.stage3_model_persistence_threshold")
    zero_module_granularity_threshold = _key("zero_optimization.stage3_module_granularity_threshold")
    zero_multi_rank_bucket_allreduce = _key("zero_optimization.use_multi_rank_bucket_allreduce")
    zero_overlap_comm = _key("zero_optimization.overlap_comm")
    zero_param_persistence_threshold = _key("zero_optimization.stage3_param_persistence_threshold")
    zero_parameter_alignment = _key("zero_optimization.parameter_alignment")
    zero_prefetch_bucket_size = _key("zero_optimization.stage3_prefetch_bucket_size")
    zero_quantized_gradients = _key("zero_optimization.zero_quantized_gradients")
    zero_quantized_nontrainable_weights = _key("zero_optimization.zero_quantized_nontrainable_weights")
    zero_quantized_weights = _key("zero_optimization.zero_quantized_weights")
    zero_reduce_bucket_size = _key("zero_optimization.reduce_bucket_size")
    zero_reduce_scatter = _key("zero_optimization.reduce_scatter")
    zero_round_robin_gradients = _key("zero_optimization.round_robin_gradients")
    zero_save_muon_momentum_buffer_in_memory = _key("zero_optimization.save_muon_momentum_buffer_in_memory")
    zero_sub_group_size = _key("zero_optimization.sub_group_size")
    is_sanity_checks_enabled = _key("zero_optimization.enable_sanity_checks")

    autotuning_enabled = _never("tuning inside a run")
    curriculum_learning_enabled = _never("curriculum")
    data_efficiency_enabled = _never("sampler beside the program's")
    data_sampling_enabled = _never("sampler beside the program's")
    random_ltd_enabled = _never("layer that drops tokens")
    is_deepcompile_active = _never("DeepCompile")
    is_deepcompile_enabled = _never("DeepCompile")

    def torch_autocast_dtype(self) -> torch.dtype:
        """What the forward is cast to where `torch_autocast_enabled`."""
        return torch.bfloat16

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.checkpoint.tag_validation != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """True: ranks that save under different tags always get an error."""
        return True

    def zero_use_cpu_optimizer(self) -> bool:
        return self._config.zero_optimization.offload_optimizer.device in ("cpu", "nvme")

    def zero_cpu_offload(self) -> bool:
        return self._config.zero_optimization.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._config.zero_optimization.offload_optimizer.device == "nvme"

    def initial_dynamic_scale(self) -> float:
        return 2.0**self._config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Returns what a dynamic loss scale begins with and moves by."""
        fp16 = self._config.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
        }
