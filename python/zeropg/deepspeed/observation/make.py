"""`make_observers`: from the configuration to what watches an engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.deepspeed.config import Config
from zeropg.deepspeed.monitor import MonitorMaster
from zeropg.deepspeed.observation.comms_logger import CommsLogger
from zeropg.deepspeed.observation.events import EventWriter
from zeropg.deepspeed.observation.flops_profiler import FlopsProfiler
from zeropg.deepspeed.observation.observer import Clock, Observer, Observers
from zeropg.deepspeed.observation.trial import TrialRun, trial_of_environment
from zeropg.deepspeed.observation.wall_clock import Progress, WallClock


def make_observers(
    config: Config, model: nn.Module, core: Any, device: torch.device, monitor: MonitorMaster
) -> Observers:
    """Returns the observers of this rank's engine. Only rank 0 prints, and writes to the monitors.

    core: of the sharded `model`. Raises ValueError where comms_logger has no counters to read.
    """
    observers: list[Observer] = []
    if config.comms_logger.enabled:
        only = None if config.comms_logger.prof_all else config.comms_logger.prof_ops
        observers.append(CommsLogger(core.process_group, verbose=config.comms_logger.verbose, only=only))
    if dist.get_rank() == 0:
        observers += _of_rank_0(config, model, core, device, monitor)
    if (trial := trial_of_environment()) is not None:
        observers.append(TrialRun(trial, core.process_group, Clock(device)))  # last: its end is the program's
    return Observers(observers)


def _of_rank_0(
    config: Config, model: nn.Module, core: Any, device: torch.device, monitor: MonitorMaster
) -> list[Observer]:
    observers: list[Observer] = [EventWriter(monitor)] if monitor.enabled else []
    every = config.steps_per_print
    if config.flops_profiler.enabled:
        observers.append(FlopsProfiler(model, config.flops_profiler, Clock(device), core.process_group.size()))
    if config.wall_clock_breakdown:
        observers.append(WallClock(Clock(device), every or 1, core.communication_seconds, monitor))
    if every:
        throughput = config.timers.throughput
        clock = Clock(device, waits=throughput.synchronized) if throughput.enabled else None
        observers.append(Progress(every, clock))
    return observers
