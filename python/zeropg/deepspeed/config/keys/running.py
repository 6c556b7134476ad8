"""What becomes of checkpoints, recomputation, monitors, profilers and logs."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.config.keys.key import Key, honoured, mapped, no_effect, refused

_OWN_WRITER = "Checkpoints are safetensors files, which all ranks write at once."
_RECOMPUTATION = "It configures deepspeed.checkpointing.checkpoint; use torch.utils.checkpoint, which works as it is."
_PROFILER = "zeropg does not count operations; use torch.profiler."
_TRAFFIC = "zeropg.stats() says what each collective has moved, at any time."
_MONITOR = "Nothing is written to it, which a run would show only at its end."
_OF_MONITOR = "It belongs to a monitor, which is refused."


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _monitor(*names: str) -> dict[str, Key]:
    return {
        "enabled": refused(_MONITOR, instead="Log from your own loop: engine.get_lr(), the loss, zeropg.stats()."),
        **{name: no_effect(_OF_MONITOR) for name in names},
    }


CHECKPOINT = {
    "tag_validation": mapped("Ranks that save under different tags always get an error, all of them."),
    "load_universal": mapped("Every checkpoint of zeropg loads at any number of ranks and in any stage."),
    "use_node_local_storage": refused(
        "All ranks write into one directory.", instead="Give a directory that all nodes share."
    ),
    "parallel_write.pipeline_stage": no_effect("There are no pipeline stages."),
    "checkpoint_serialization": no_effect(_OWN_WRITER),
    "writer.type": no_effect(_OWN_WRITER),
    "writer.io_buffer_size": no_effect(_OWN_WRITER),
    "writer.io_buffer_double": no_effect(_OWN_WRITER),
    "writer.show_statistics": no_effect(_OWN_WRITER),
    "writer.data_parallel": no_effect(_OWN_WRITER),
    "writer.decoupled": no_effect("zeropg.save_checkpoint(async_save=True) writes in the background."),
    "writer.io_multiplier": no_effect(_OWN_WRITER),
}

MEMORY = {
    "datastates_ckpt": refused(
        "It is a writer of checkpoints of its own.",
        instead="Use zeropg.save_checkpoint(async_save=True), which writes in the background.",
        refuses=_is_set,
    ),
    "disable_python_gc": no_effect("Call gc.disable() yourself where its pauses show."),
    "vocabulary_size": no_effect("DeepSpeed only warns of sizes that tensor cores do not like."),
}

RECOMPUTATION = {
    "partition_activations": no_effect(_RECOMPUTATION),
    "number_checkpoints": no_effect(_RECOMPUTATION),
    "contiguous_memory_optimization": no_effect(_RECOMPUTATION),
    "cpu_checkpointing": no_effect(_RECOMPUTATION),
    "synchronize_checkpoint_boundary": no_effect(_RECOMPUTATION),
    "profile": no_effect(_RECOMPUTATION),
}

OBSERVATION = {
    "steps_per_print": honoured("Every so many steps rank 0 prints a line to stderr."),
    "wall_clock_breakdown": no_effect("The engine keeps no timers; use torch.profiler."),
    "memory_breakdown": no_effect("python -m zeropg plan computes memory before a run."),
    "dump_state": no_effect("python -m zeropg config prints what becomes of each key."),
    "log_level": no_effect('zeropg logs as logging.getLogger("zeropg"), whose level is yours to set.'),
    "timers.throughput.enabled": no_effect("The engine keeps no timers; use torch.profiler."),
    "timers.throughput.synchronized": no_effect("The engine keeps no timers; use torch.profiler."),
    "comms_logger.enabled": no_effect(_TRAFFIC),
    "comms_logger.verbose": no_effect(_TRAFFIC),
    "comms_logger.prof_all": no_effect(_TRAFFIC),
    "comms_logger.debug": no_effect(_TRAFFIC),
    "comms_logger.prof_ops": no_effect(_TRAFFIC),
    "flops_profiler.enabled": no_effect(_PROFILER),
    "flops_profiler.recompute_fwd_factor": no_effect(_PROFILER),
    "flops_profiler.profile_step": no_effect(_PROFILER),
    "flops_profiler.module_depth": no_effect(_PROFILER),
    "flops_profiler.top_modules": no_effect(_PROFILER),
    "flops_profiler.detailed": no_effect(_PROFILER),
    "flops_profiler.output_file": no_effect(_PROFILER),
}

TENSORBOARD = _monitor("output_path", "job_name")
WANDB = _monitor("group", "team", "project")
COMET = _monitor(
    "samples_log_interval",
    "project",
    "workspace",
    "api_key",
    "experiment_name",
    "experiment_key",
    "online",
    "mode",
)
