"""The block `zero_optimization`: what is sharded, and where the shards are kept."""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import Field, field_validator

from zeropg.deepspeed.config.blocks.section import Count, Fraction, Positive, Section

Device = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """`zero_optimization.offload_param`; sizes in elements."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000
    pin_memory: bool = True


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Fraction = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Fraction = 0.8


class LeafModule(Section):
    """`zero_optimization.leaf_module`: modules that are made whole together."""

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()

    @field_validator("*", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class _Stage3(Section):
    """Keys of `zero_optimization` whose names say that they belong to stage 3."""

    stage3_prefetch_bucket_size: Count = 50_000_000
    stage3_param_persistence_threshold: Count = 100_000
    stage3_model_persistence_threshold: Count = sys.maxsize
    stage3_max_live_parameters: Count = 1_000_000_000
    stage3_max_reuse_distance: Count = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: Count = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False


class ZeroOptimization(_Stage3):
    """`zero_optimization`; bucket sizes, thresholds and distances in elements."""

    stage: Literal[0, 1, 2, 3] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Positive = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParam = Field(default_factory=OffloadParam)
    offload_optimizer: OffloadOptimizer = Field(default_factory=OffloadOptimizer)
    zenflow: dict[str, Any] | None = None
    sub_group_size: Count = 1_000_000_000
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModule = Field(default_factory=LeafModule)
