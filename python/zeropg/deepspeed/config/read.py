"""`read`: from a file, a text or a dictionary to a `Config`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeropg.deepspeed.config.auto import Unfilled, take_out
from zeropg.deepspeed.config.batch import batch_sizes, data_parallel_size
from zeropg.deepspeed.config.conflicts import conflicts
from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.config.names import with_current_names
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.config.validate import validate
from zeropg.deepspeed.config.verdict import Verdict, verdicts

LOGGER = logging.getLogger("zeropg")


@dataclass(frozen=True)
class Reading:
    """A configuration before it is decided whether it can be used.

    config: without the keys that are "auto". unfilled: those of them that somebody has to fill. notices: sentences
    about names that are deprecated. verdicts: of the other keys. conflicts: sentences about keys that do not fit.
    """

    config: Config
    unfilled: tuple[Unfilled, ...]
    notices: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    conflicts: tuple[str, ...]

    @property
    def refused(self) -> list[str]:
        """A sentence for each reason why it cannot be used, whatever fills "auto"."""
        return [verdict.problem for verdict in self.verdicts if verdict.outcome == "refused"] + list(self.conflicts)

    @property
    def without_effect(self) -> list[str]:
        """Keys that ask for something other than the default, on which nothing hangs here."""
        return [one.key for one in self.verdicts if one.outcome == "no effect" and not one.is_default]


def read(config: str | Path | dict[str, Any], *, world_size: int) -> Config:
    """Returns DeepSpeed's configuration, complete: the batch sizes that it does not give follow from the others.

    Rank 0 warns, through the logger `zeropg`, of deprecated names and of keys that have no effect. Unfilled "auto" is
    DeepSpeed's default where DeepSpeed takes it so and nothing but speed hangs on it.

    Args:
        config: a path of a JSON file, JSON in URL-safe base64 as DeepSpeed takes it, or a dictionary, which stays as it
            is.
        world_size: all ranks; batches are divided among them, or where tensors are cut among groups of autotp_size.

    Raises ConfigError, with a line for each key that is unknown, refused, "auto" or in conflict with another.
    """
    found = examine(load(config))
    problems = found.refused + [str(one) for one in found.unfilled]
    if problems:
        raise ConfigError(problems)
    settings = found.config
    sizes = batch_sizes(
        settings.train_batch_size,
        settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps,
        data_parallel_size(world_size, settings.tensor_parallel.size),
    )
    if not (dist.is_initialized() and dist.get_rank() > 0):
        _warn(found)
    return settings.model_copy(update=sizes._asdict())


def examine(config: dict[str, Any]) -> Reading:
    """Returns what is to be said of a configuration. Raises ConfigError for unknown keys and values of wrong types."""
    renamed, notices = with_current_names(config)
    filled, unfilled = take_out(renamed)
    settings = validate(filled)
    against = conflicts(settings, [one.key for one in unfilled])
    return Reading(settings, tuple(unfilled), tuple(notices), tuple(verdicts(settings)), tuple(against))


def _warn(found: Reading) -> None:
    for notice in found.notices:
        LOGGER.warning("[zeropg] DeepSpeed config: %s", notice)
    if found.without_effect:
        LOGGER.warning(
            "[zeropg] DeepSpeed config: without effect here, as python -m zeropg config explains: %s",
            ", ".join(found.without_effect),
        )
