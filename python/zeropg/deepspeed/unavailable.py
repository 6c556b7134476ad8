"""What DeepSpeed has and zeropg has not, and what a program uses instead: names, of the engine too, and modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_PIPELINES = "pipelines are not available; call engine(batch), engine.backward(loss) and engine.step()"
_REDUCES = "backwards reduce gradients; engine.no_sync() and engine.coalesce_grad_reduction() say which"
_SPARSE = "gradients of sharded models are dense"
_OWN_FORMAT = "checkpoints are safetensors of zeropg's own; use engine.save_checkpoint and engine.load_checkpoint"
_TIMES = "use wall_clock_breakdown of the configuration, or ZEROPG_TRACE and python -m zeropg trace"
_DEEP_COMPILE = "DeepCompile is not available; use engine.compile()"
_SAMPLES = "samples and their order are the program's: use a sampler of your own"
_EXPERTS = "there is no expert parallelism; ranks of a node may take different paths through a mixture of experts"

# Of the engine, by name: "use ... instead".
UNAVAILABLE = {
    "allreduce_gradients": _REDUCES,
    "buffered_allreduce_fallback": _REDUCES,
    "allreduce_bucket": _REDUCES,
    "clip_fp32_gradients": "engine.step() clips by gradient_clipping; zeropg.clip_grad_norm_(engine.module, norm) does",
    "eval_batch": _PIPELINES,
    "train_batch": _PIPELINES,
    "sparse_allreduce": _SPARSE,
    "sparse_allreduce_bucket": _SPARSE,
    "sparse_allreduce_no_retain": _SPARSE,
    "checkpoint_engine": _OWN_FORMAT,
    "load_moe_state_dict": _EXPERTS,
    "expert_parallel_group": _EXPERTS,
    "expert_data_parallel_group": _EXPERTS,
    "get_wall_clock_timers": _TIMES,
    "timers": _TIMES,
    "engine_timers": _TIMES,
    "tput_timer": "use steps_per_print with timers.throughput of the configuration",
    "flops_profiler": "use the configuration's block of that name; it prints after its step",
    "register_compile_pass": _DEEP_COMPILE,
    "get_compile_time": _DEEP_COMPILE,
    "set_data_post_process_func": _SAMPLES,
    "set_custom_curriculum_learning_schedule": _SAMPLES,
    "random_ltd_initialize": _SAMPLES,
    "basic_optimizer": "use engine.optimizer.optimizer",
    "client_optimizer": "use engine.optimizer.optimizer",
    "client_lr_scheduler": "use engine.lr_scheduler",
    "training_data": "use engine.training_dataloader.dataset",
}

_STAGES = "torch.distributed.pipelining runs over zeropg's groups; without pipeline stages call initialize(model=)"
_INFERENCE = (
    "there is no engine for inference alone; call generate inside zeropg.full_parameters(engine.module), or export by "
    "zeropg.save_16bit_weights and serve that"
)
_MIXTURES = (
    "pass a mixture of experts of your own; ranks may take different paths through it, without expert parallelism"
)
_SPLITS = (
    "tensor_parallel.autotp_size of the configuration cuts layers over ranks; so does zeropg.deepspeed.tp_model_init"
)
_SEQUENCES = "sequences are not split over ranks; use torch's context_parallel over zeropg's groups"
_KERNELS = "zeropg builds no operators; use torch.nn's modules and scaled_dot_product_attention"
_FLOPS = "use the configuration's block flops_profiler, or torch.utils.flop_counter"
_COUNTS = "say comms_logger in the configuration; zeropg.stats() has the counters"
_LAUNCHES = "start scripts by python -m zeropg run; python -m zeropg doctor says what is there"
_OWN_STATES = "engine.optimizer is the sharded one; zeropg.local_shards and deepspeed.utils.safe_get_... have its parts"
README = "README.md (From DeepSpeed) says what is, and what differs"

# Of the package itself.
NAMES = {
    "DeepSpeedHybridEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "DeepSpeedOptimizer": _OWN_STATES,
    "DeepSpeedTransformerConfig": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "InferenceEngine": _INFERENCE,
    "PipelineEngine": _STAGES,
    "PipelineModule": _STAGES,
    "default_inference_config": _INFERENCE,
    "init_inference": _INFERENCE,
    "module_inject": _SPLITS,
    "moe": _MIXTURES,
    "pipe": _STAGES,
    "profiling": _FLOPS,
    "replace_transformer_layer": _KERNELS,
}

# Of deepspeed.comm.
COMM = dict.fromkeys(
    ("configure", "get_comm_operation_count", "get_logged_comm_ops", "has_comm_data", "reset_log"), _COUNTS
)

# Modules, by where their names begin.
_MODULES = {
    "accelerator": "deepspeed.get_accelerator() returns the one that there is",
    "autotuning": "python -m zeropg tune finds the fastest stage and micro-batch",
    "checkpoint": _OWN_FORMAT + "; python -m zeropg export and zero_to_fp32 convert",
    "compression": "quantize or prune with a library for that; zeropg.compression is about what travels",
    "env_report": _LAUNCHES,
    "inference": _INFERENCE,
    "launcher": _LAUNCHES,
    "linear": "use zeropg.quantize_frozen, and PEFT for the adapters",
    "model_implementations": _INFERENCE,
    "module_inject": _SPLITS,
    "moe": _MIXTURES,
    "monitor.config": "deepspeed.DeepSpeedConfig(config).monitor_config has it",
    "ops": _KERNELS,
    "pipe": _STAGES,
    "profiling": _FLOPS,
    "runtime.base_optimizer": _OWN_STATES,
    "runtime.bf16_optimizer": _OWN_STATES,
    "runtime.data_pipeline": _SAMPLES,
    "runtime.fp16": _OWN_STATES + "; engine.optimizer.loss_scaler is the loss scale",
    "runtime.pipe": _STAGES,
    "runtime.sequence_parallel": _SEQUENCES,
    "runtime.zero.tiling": "nothing needs it: checkpoint_activations, or a unit of its own, bounds what is whole",
    "sequence": _SEQUENCES,
    "utils.timer": _TIMES,
    "": README,
}


class _MissingModules(MetaPathFinder):
    """Asked last, for modules that nobody else has found. One of DeepSpeed's is an error that says what to use."""

    def __init__(self, package: str) -> None:
        self._package = f"{package}."

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Returns None for other packages. Raises ModuleNotFoundError."""
        if not fullname.startswith(self._package):
            return
        name = fullname.removeprefix(self._package)
        nearest = max((known for known in _MODULES if f"{name}.".startswith(f"{known}.") or not known), key=len)
        instead = NAMES.get(name, _MODULES[nearest])
        # Without its `name`: `from deepspeed import NAME` would leave these words out.
        raise ModuleNotFoundError(f"[zeropg] deepspeed.{name} is not available: {instead}")


def explain_missing_modules(package: str) -> None:
    """Lets imports of modules that `package` lacks say what to use, for the whole process. Call it once."""
    sys.meta_path.append(_MissingModules(package))
