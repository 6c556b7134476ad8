"""The blocks that measure and report: monitors, profilers, timers, loggers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zeropg.deepspeed.config.blocks.section import Count, Positive, Section


class FileMonitor(Section):
    """`tensorboard`, `csv_monitor`."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Wandb(Section):
    """`wandb`."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class Comet(Section):
    """`comet`."""

    enabled: bool = False
    samples_log_interval: Positive = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class FlopsProfiler(Section):
    """`flops_profiler`."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: Count = 1
    module_depth: int = -1
    top_modules: Count = 1
    detailed: bool = True
    output_file: str | None = None


class CommsLogger(Section):
    """`comms_logger`."""

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: tuple[str, ...] = ()


class Throughput(Section):
    """`timers.throughput`."""

    enabled: bool = True
    synchronized: bool = True


class Timers(Section):
    """`timers`."""

    throughput: Throughput = Field(default_factory=Throughput)
