"""`MonitorMaster`: all monitors of an engine, as `engine.monitor`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch.distributed as dist

from zeropg.deepspeed.config import Config
from zeropg.rank_io.agreement import together

# A tag such as "Train/Samples/lr", a number, and where it belongs on the x axis: engines give samples so far.
Event = tuple[str, Any, int]


class Monitor(Protocol):
    """One place for events. There is one on rank 0 alone."""

    def write(self, events: Sequence[Event]) -> None: ...


class MonitorMaster:
    """Writes to all monitors that a configuration enables. `enabled` is the same on every rank."""

    def __init__(self, monitors: Sequence[Monitor], *, enabled: bool) -> None:
        """monitors: none but on rank 0."""
        self.enabled = enabled
        self._monitors = list(monitors)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes (tag, value, x) events; on ranks other than 0 nothing happens. Does not communicate.

        Values are numbers, or tensors of one.
        """
        if not self._monitors:
            return
        events = [(tag, float(value), int(x)) for tag, value, x in event_list]
        for monitor in self._monitors:
            monitor.write(events)

    def note(self, event_list: Sequence[Event]) -> None:
        """write_events, for a training step: an error must not stop rank 0 alone, so it is logged, once.

        The monitor that raised is given no more events.
        """
        for monitor in [*self._monitors]:
            try:
                monitor.write([(tag, float(value), int(x)) for tag, value, x in event_list])
            except Exception as error:
                self._monitors.remove(monitor)
                logging.getLogger("zeropg").warning(
                    "%s stops: it could not write (%s: %s). Training goes on without it.",
                    type(monitor).__name__,
                    type(error).__name__,
                    error,
                )


def make_monitor(config: Config, group: dist.ProcessGroup) -> MonitorMaster:
    """Opens what the configuration enables, on global rank 0. All ranks of the group must call.

    Raises, on every rank:
        RuntimeError: the package of a monitor is missing.
        OSError: a folder cannot be made.
    """
    from zeropg.deepspeed.monitor.comet import CometMonitor
    from zeropg.deepspeed.monitor.csv_files import CsvMonitor
    from zeropg.deepspeed.monitor.tensorboard import TensorBoardMonitor
    from zeropg.deepspeed.monitor.wandb import WandbMonitor

    wanted: list[Callable[[], Monitor]] = []
    if config.tensorboard.enabled:
        wanted.append(lambda: TensorBoardMonitor(config.tensorboard))
    if config.wandb.enabled:
        wanted.append(lambda: WandbMonitor(config.wandb))
    if config.csv_monitor.enabled:
        wanted.append(lambda: CsvMonitor(config.csv_monitor))
    if config.comet.enabled:
        wanted.append(lambda: CometMonitor(config.comet))
    monitors: list[Monitor] = []

    def open_monitors() -> None:
        if dist.get_rank() == 0:
            monitors.extend(make() for make in wanted)

    if wanted:
        together(group, "initialize", open_monitors)
    return MonitorMaster(monitors, enabled=bool(wanted))


def package(module: str, block: str, package_name: str) -> ModuleType:
    """Imports a monitor's package. Raises RuntimeError with what to do where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(
            f"{block}.enabled is true, and it needs the package {package_name}, which cannot be imported here "
            f"({error}); pip install {package_name}, or use csv_monitor, which needs none"
        ) from error
