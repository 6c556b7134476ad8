"""`wandb`: Weights & Biases, by the package wandb."""

from __future__ import annotations

from collections.abc import Sequence

from zeropg.deepspeed.config.blocks.observation import Wandb
from zeropg.deepspeed.monitor.monitor import Event, package


class WandbMonitor:
    """Logs into a run of its own, or into the one that the program has begun; x is wandb's step."""

    def __init__(self, settings: Wandb) -> None:
        """Begins the run. Raises RuntimeError without the package, and what wandb raises."""
        self._wandb = package("wandb", "wandb", "wandb")
        if getattr(self._wandb, "run", None) is None:
            self._wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, x in events:
            self._wandb.log({tag: value}, step=x)
