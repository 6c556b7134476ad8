"""What becomes of checkpoints, recomputation, monitors, profilers and logs."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.config.keys.key import honoured, mapped, no_effect, refused

_OWN_WRITER = "Checkpoints are safetensors files, which all ranks write at once."
_RECOMPUTATION = "deepspeed.checkpointing.configure takes it, for what deepspeed.checkpointing.checkpoint keeps."
_NO_BUFFERS = "deepspeed.checkpointing.checkpoint has no buffers of its own; torch keeps what it must."


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


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
    "partition_activations": mapped(_RECOMPUTATION),
    "number_checkpoints": no_effect(_NO_BUFFERS),
    "contiguous_memory_optimization": no_effect(_NO_BUFFERS),
    "cpu_checkpointing": mapped(_RECOMPUTATION),
    "synchronize_checkpoint_boundary": no_effect(_NO_BUFFERS),
    "profile": no_effect("ZEROPG_TRACE and python -m zeropg trace show a step's time."),
}

OBSERVATION = {
    "steps_per_print": honoured("Every so many steps rank 0 prints a line to stderr."),
    "wall_clock_breakdown": honoured(
        "Rank 0 prints the times of forward, backward and step to stderr: every steps_per_print steps, else every step."
    ),
    "memory_breakdown": no_effect("python -m zeropg plan computes memory before a run."),
    "dump_state": no_effect("python -m zeropg config prints what becomes of each key."),
    "log_level": no_effect('zeropg logs as logging.getLogger("zeropg"), whose level is yours to set.'),
    "timers.throughput.enabled": honoured("Adds the samples per second to the lines of steps_per_print."),
    "timers.throughput.synchronized": honoured("The clock is read once the device has done its work."),
    "comms_logger.enabled": honoured(
        "zeropg.deepspeed.comm.log_summary() prints what collectives have moved, and how fast; groups of zeropg only."
    ),
    "comms_logger.verbose": mapped("Rank 0 prints a line for each kind of operation of each step."),
    "comms_logger.prof_all": honoured("False: prof_ops says which operations are shown."),
    "comms_logger.debug": no_effect("It adds the names of DeepSpeed's own functions to the lines."),
    "comms_logger.prof_ops": honoured("Names of operations, where prof_all is false: all_reduce, for one."),
    "flops_profiler.enabled": honoured(
        "Rank 0 prints operations, times and their quotient by module; operations as torch.utils.flop_counter counts."
    ),
    "flops_profiler.recompute_fwd_factor": no_effect("What the backward computes again is counted as it runs."),
    "flops_profiler.profile_step": honoured(
        "The step that is timed, counted from 0; operations are counted one before."
    ),
    "flops_profiler.module_depth": honoured("Of the aggregated profile; -1: all depths."),
    "flops_profiler.top_modules": honoured("Classes of modules that the aggregated profile names at each depth."),
    "flops_profiler.detailed": honoured("Whether each module has a line."),
    "flops_profiler.output_file": honoured("A file of rank 0's instead of stderr."),
}

_EVENTS = "After each update rank 0 writes train_loss, lr and, in fp16, loss_scale over the samples so far"
_FILES = {
    "output_path": honoured("The folder; without it the one where the program runs."),
    "job_name": honoured("A folder in output_path."),
}
CSV = {"enabled": honoured(f"{_EVENTS}: a file for each tag."), **_FILES}
TENSORBOARD = {"enabled": honoured(f"{_EVENTS}; needs the package tensorboard."), **_FILES}
_WANDB = "Of wandb.init, where the program has not begun a run."
WANDB = {
    "enabled": honoured(f"{_EVENTS}; needs the package wandb."),
    "group": honoured(_WANDB),
    "team": honoured(_WANDB),
    "project": honoured(_WANDB),
}
_COMET = "Of comet_ml.start."
COMET = {
    "enabled": honoured(f"{_EVENTS}; needs the package comet_ml."),
    "samples_log_interval": honoured("Samples between two values of a tag."),
    "project": honoured(_COMET),
    "workspace": honoured(_COMET),
    "api_key": honoured(_COMET),
    "experiment_name": honoured("The experiment's name."),
    "experiment_key": honoured(_COMET),
    "online": honoured(_COMET),
    "mode": honoured(_COMET),
}
