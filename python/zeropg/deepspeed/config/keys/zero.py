"""What becomes of `zero_optimization`, `aio` and the keys beside them."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.config.keys.key import honoured, mapped, no_effect, refused

_OWN_BUCKETS = "zeropg's core cuts gradients into pieces of its own while the backward runs."
_UNITS = "Blocks of the model are gathered whole, in an order that is known before the first step."
_PIPELINE = "Steps through a disk always read, compute and write side by side."
_NO_NVME_PARAMETERS = "It belongs to parameters on a disk, which are refused."


def _is_on_disk(device: Any) -> bool:
    return bool(device == "nvme")


ZERO = {
    "stage": honoured("fully_shard(stage=): the four stages train alike, bit for bit."),
    "contiguous_gradients": no_effect("Gradients always lie in flat buffers."),
    "reduce_scatter": no_effect("Stages 2 and 3 always reduce-scatter; stages 0 and 1 always all-reduce."),
    "reduce_bucket_size": no_effect(_OWN_BUCKETS),
    "use_multi_rank_bucket_allreduce": no_effect(_OWN_BUCKETS),
    "allgather_partitions": no_effect("Updated parameters are always gathered, or shared by the ranks of a node."),
    "allgather_bucket_size": no_effect("Updated parameters travel in pieces of zeropg's own."),
    "overlap_comm": no_effect("Communication always runs beside the backward, on a thread of its own."),
    "compute_grad_norm": no_effect("The norm is computed when clipping, or get_global_grad_norm(), asks for it."),
    "load_from_fp32_weights": no_effect("Checkpoints hold the fp32 masters, and these are loaded."),
    "elastic_checkpoint": no_effect("Checkpoints always load at any number of ranks and in any stage."),
    "offload_param.device": mapped(
        'fully_shard(offload_params="cpu"): on a CPU model nothing changes, beside a GPU it is an error.',
        refuses=_is_on_disk,
        because="Parameters stay in the memory that computes.",
        instead='Use "none", and offload_optimizer for what only the step needs.',
    ),
    "offload_param.nvme_path": no_effect(_NO_NVME_PARAMETERS),
    "offload_param.buffer_count": no_effect(_NO_NVME_PARAMETERS),
    "offload_param.buffer_size": no_effect(_NO_NVME_PARAMETERS),
    "offload_param.max_in_cpu": no_effect(_NO_NVME_PARAMETERS),
    "offload_param.pin_memory": no_effect("Parameters stay in the memory that computes."),
    "offload_optimizer.device": mapped(
        "fully_shard(offload_optimizer=): cpu is host memory (on a CPU model nothing changes), nvme is a file."
    ),
    "offload_optimizer.nvme_path": honoured(
        "The directory of the file, which has no name in it and goes with the run."
    ),
    "offload_optimizer.buffer_count": no_effect("A step through a disk has one ring of buffers, 64 MiB together."),
    "offload_optimizer.pin_memory": honoured("zeropg.Offload(pin_memory=)."),
    "offload_optimizer.pipeline_read": no_effect(_PIPELINE),
    "offload_optimizer.pipeline_write": no_effect(_PIPELINE),
    "offload_optimizer.fast_init": no_effect("The file gets its room when the optimizer is sharded."),
    "offload_optimizer.ratio": no_effect("All of the optimizer's state is offloaded, which needs the least memory."),
    "offload_optimizer.super_offload": no_effect("There is one way to offload; it gives the same results."),
    "offload_optimizer.cpuadam_cores_perc": no_effect("The step runs on torch's threads: OMP_NUM_THREADS."),
    "zenflow": refused(
        "It applies most gradients later, which trains differently.",
        instead="Use offload_optimizer: the losses stay the same to the bit.",
    ),
    "sub_group_size": no_effect("The step runs over flat buffers in pieces of zeropg's own."),
    "stage3_prefetch_bucket_size": mapped(
        "fully_shard(prefetch_numel=): elements of the blocks that are gathered ahead, and at least one block; not "
        "given: one block."
    ),
    "stage3_param_persistence_threshold": mapped(
        "fully_shard(persistent_numel=): blocks, not parameters, of at most so many elements stay whole between steps; "
        "not given: none."
    ),
    "stage3_model_persistence_threshold": no_effect("stage3_max_live_parameters bounds what persists, too."),
    "stage3_max_live_parameters": mapped(
        "fully_shard(max_whole_numel=): bounds what is gathered ahead and kept beside what runs; not given: no limit."
    ),
    "stage3_max_reuse_distance": no_effect(_UNITS),
    "stage3_module_granularity_threshold": no_effect(_UNITS),
    "stage3_use_all_reduce_for_fetch_params": no_effect(_UNITS),
    "stage3_allgather_sequential": no_effect(_UNITS),
    "stage3_gather_16bit_weights_on_model_save": honoured(
        "Without it save_16bit_model writes nothing in stage 3; zeropg.save_16bit_weights always does."
    ),
    "ignore_unused_parameters": no_effect("Parameters that no rank has used are no error and are not stepped."),
    "legacy_stage1": refused("DeepSpeed has removed it.", instead="Leave it out."),
    "round_robin_gradients": no_effect("Each rank owns a flat range of all blocks, so the load is even."),
    "parameter_alignment": no_effect("Parameters are always aligned in flat buffers."),
    "zero_hpz_partition_size": mapped(
        "Above 1: fully_shard(keep_numel=): blocks stay whole from the forward to the backward. On CPUs over zeropg "
        "all of them do, in one copy for the ranks of a node; elsewhere as many as take the memory of DeepSpeed's "
        "second shard."
    ),
    "zero_quantized_weights": mapped(
        "True: updated weights travel in 8 bits, on CPUs over groups of zeropg: Plan(weights=BlockQuant(8))."
    ),
    "zero_quantized_nontrainable_weights": mapped(
        'True: zeropg.quantize_frozen(format="int8") before the model is sharded, in every stage: frozen weights of '
        "linear layers are kept, sent and saved in 8 bits, under the name packed_weight."
    ),
    "zero_quantized_gradients": mapped(
        "True: gradients travel in 4 bits with error feedback, on CPUs over groups of zeropg: BlockQuant(4)."
    ),
    "zeropp_loco_param": mapped("zero_quantized_gradients always has error feedback here, without a decay or a reset."),
    "mics_shard_size": mapped(
        "Groups of so many ranks shard a copy of the model each, in any stage: fully_shard(mesh=) of two dimensions."
    ),
    "mics_hierarchical_params_gather": no_effect("It belongs to MiCS; gathers always know the nodes."),
    "memory_efficient_linear": no_effect("No function of torch is replaced."),
    "pipeline_loading_checkpoint": no_effect("Ranks always load their own ranges of a checkpoint side by side."),
    "override_module_apply": no_effect("No function of torch is replaced; Module.apply sees parameters as they are."),
    "log_trace_cache_warnings": no_effect("There is no trace that could become invalid."),
    "enable_sanity_checks": no_effect("A write to a parameter always counts, or is an error at the place."),
    "save_muon_momentum_buffer_in_memory": no_effect("Muon's momenta stay in memory, as shards."),
    "leaf_module.classes": mapped(
        "fully_shard(units=): each is whole at once; not given: DeepSpeed's own list, where units would cut one."
    ),
    "leaf_module.names": mapped("fully_shard(units=): each is whole at once."),
    "leaf_module.name_suffixes": mapped("fully_shard(units=): each is whole at once."),
}

AIO = {
    "block_size": no_effect("Files are read and written in blocks of zeropg's own."),
    "queue_depth": no_effect("Files are read and written in blocks of zeropg's own."),
    "intra_op_parallelism": mapped(
        "zeropg.Offload(threads=): threads that read and write the file; 4 if it is not set."
    ),
    "single_submit": no_effect("Files are read and written in blocks of zeropg's own."),
    "overlap_events": no_effect(_PIPELINE),
    "use_gds": no_effect("The file is read into host memory."),
}

BESIDE_ZERO = {
    "zero_allow_untested_optimizer": mapped(
        "Nothing needs allowing: what shard_optimizer cannot step is an error with the reason."
    ),
    "zero_force_ds_cpu_optimizer": mapped("Adagrad, Adam, AdamW, Lion and SGD step in zeropg's kernels on the CPU."),
}
