"""`Config`: all of DeepSpeed's configuration."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zeropg.deepspeed.config.blocks.activation import ActivationCheckpointing
from zeropg.deepspeed.config.blocks.observation import (
    Comet,
    CommsLogger,
    FileMonitor,
    FlopsProfiler,
    Timers,
    Wandb,
)
from zeropg.deepspeed.config.blocks.parallel import TensorParallel
from zeropg.deepspeed.config.blocks.precision import Bf16, DataTypes, Fp16, TorchAutocast
from zeropg.deepspeed.config.blocks.section import Count, Positive, Section
from zeropg.deepspeed.config.blocks.storage import Aio, Checkpoint
from zeropg.deepspeed.config.blocks.update import Optimizer, Scheduler
from zeropg.deepspeed.config.blocks.zero import ZeroOptimization

Wire = Literal["fp32", "fp16", "bf16"]
# accelerate writes infinity, which JSON has as a word of its own, for "never".
_Pace = Annotated[Count | None, BeforeValidator(lambda steps: None if steps == math.inf else steps)]


class _Running(Section):
    """Keys about memory, files, logs and measurements."""

    activation_checkpointing: ActivationCheckpointing = Field(default_factory=ActivationCheckpointing)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    datastates_ckpt: Any = None
    dataloader_drop_last: bool = False
    disable_python_gc: bool = False
    vocabulary_size: Positive | None = None

    steps_per_print: _Pace = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: str | None = None
    timers: Timers = Field(default_factory=Timers)
    comms_logger: CommsLogger = Field(default_factory=CommsLogger)
    flops_profiler: FlopsProfiler = Field(default_factory=FlopsProfiler)
    tensorboard: FileMonitor = Field(default_factory=FileMonitor)
    csv_monitor: FileMonitor = Field(default_factory=FileMonitor)
    wandb: Wandb = Field(default_factory=Wandb)
    comet: Comet = Field(default_factory=Comet)


class _Elsewhere(Section):
    """Blocks that zeropg serves in no part, and those that DeepSpeed has removed: dictionaries as they are."""

    compile: dict[str, Any] | None = None
    expert_parallel: dict[str, Any] | None = None
    use_data_before_expert_parallelism: bool = False
    sequence_parallel_size: Positive = 1
    pipeline: dict[str, Any] | None = None
    hybrid_engine: dict[str, Any] | None = None
    autotuning: dict[str, Any] | None = None
    data_efficiency: dict[str, Any] | None = None
    weight_quantization: dict[str, Any] | None = None

    amp: dict[str, Any] | None = None
    compression_training: dict[str, Any] | None = None
    curriculum_learning: dict[str, Any] | None = None
    eigenvalue: dict[str, Any] | None = None
    elasticity: dict[str, Any] | None = None
    graph_harvesting: bool = False
    nebula: dict[str, Any] | None = None
    progressive_layer_drop: dict[str, Any] | None = None
    quantize_training: dict[str, Any] | None = None
    sparse_attention: dict[str, Any] | None = None
    sparse_gradients: bool = False


class Config(_Running, _Elsewhere):
    """DeepSpeed's configuration, as `read` gives it: the three batch sizes are whole numbers that fit each other.

    Defaults are those of DeepSpeed 0.19.8.
    """

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    managed_gradient_accumulation: bool = True

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization)
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    aio: Aio = Field(default_factory=Aio)
    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel)

    fp16: Fp16 = Field(default_factory=Fp16)
    bf16: Bf16 = Field(default_factory=Bf16)
    torch_autocast: TorchAutocast = Field(default_factory=TorchAutocast)
    data_types: DataTypes = Field(default_factory=DataTypes)

    optimizer: Optimizer = Field(default_factory=Optimizer)
    scheduler: Scheduler = Field(default_factory=Scheduler)
    gradient_clipping: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    communication_data_type: Wire | None = None
    seq_parallel_communication_data_type: Wire | None = "fp32"
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    prescale_gradients: bool = False
    gradient_predivide_factor: float = Field(default=1.0, gt=0)
    disable_allgather: bool = False
