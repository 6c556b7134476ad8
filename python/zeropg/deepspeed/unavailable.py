"""What DeepSpeed's engine has and this one has not, and what a program uses instead."""

from __future__ import annotations

_PIPELINES = "pipelines are not available; call engine(batch), engine.backward(loss) and engine.step()"
_REDUCES = "backwards reduce gradients; engine.no_sync() and engine.coalesce_grad_reduction() say which"
_SPARSE = "gradients of sharded models are dense"
_OWN_FORMAT = "checkpoints are safetensors of zeropg's own; use engine.save_checkpoint and engine.load_checkpoint"
_TIMES = "use wall_clock_breakdown of the configuration, or ZEROPG_TRACE and python -m zeropg trace"
_DEEP_COMPILE = "DeepCompile is not available; use engine.compile()"
_SAMPLES = "samples and their order are the program's: use a sampler of your own"
_EXPERTS = "there is no expert parallelism; ranks of a node may take different paths through a mixture of experts"

# By name: "use ... instead".
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
    "tensor_parallel_config": "no tensor is split over ranks; use torch's own parallelism over zeropg's groups",
}
