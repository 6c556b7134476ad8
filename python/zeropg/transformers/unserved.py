"""Keys of DeepSpeed's configuration that its engine serves, and a Trainer does not: it has its own ways."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from zeropg.deepspeed.config import Config

LOGGER = logging.getLogger("zeropg")

# What a key asks for, and what to use instead.
_UNSERVED: dict[str, tuple[Callable[[Config], Any], str]] = {
    "comms_logger": (lambda config: config.comms_logger.enabled, "zeropg.stats"),
    "comet": (lambda config: config.comet.enabled, "TrainingArguments(report_to='comet_ml')"),
    "csv_monitor": (lambda config: config.csv_monitor.enabled, "trainer.state.log_history, or report_to="),
    "dataloader_drop_last": (lambda config: config.dataloader_drop_last, "TrainingArguments(dataloader_drop_last=)"),
    "flops_profiler": (lambda config: config.flops_profiler.enabled, "torch.profiler with with_flops=True"),
    "steps_per_print": (lambda config: config.steps_per_print, "TrainingArguments(logging_steps=)"),
    "tensorboard": (lambda config: config.tensorboard.enabled, "TrainingArguments(report_to='tensorboard')"),
    "wall_clock_breakdown": (lambda config: config.wall_clock_breakdown, "ZEROPG_TRACE=folder"),
    "wandb": (lambda config: config.wandb.enabled, "TrainingArguments(report_to='wandb')"),
}
_said: set[str] = set()


def unserved(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the keys that a configuration sets and a Trainer has no use for, and what to use instead of each."""
    for key, (asks, instead) in _UNSERVED.items():
        if asks(config):
            yield key, instead


def warn_of_unserved(config: Config) -> None:
    """Names each such key once in a process."""
    for key, instead in unserved(config):
        if key not in _said:
            _said.add(key)
            LOGGER.warning("[zeropg] Trainer: %s does nothing under the Trainer; use %s", key, instead)
