"""`comet`: Comet, by the package comet_ml."""

from __future__ import annotations

from collections.abc import Sequence

from zeropg.deepspeed.config.blocks.observation import Comet
from zeropg.deepspeed.monitor.monitor import Event, package


class CometMonitor:
    """Logs each tag again once `samples_log_interval` has passed on its x axis. `experiment` is Comet's."""

    def __init__(self, settings: Comet) -> None:
        """Begins the experiment. Raises RuntimeError without the package, and what Comet raises."""
        self.experiment = package("comet_ml", "comet", "comet_ml").start(
            api_key=settings.api_key,
            project=settings.project,
            workspace=settings.workspace,
            experiment_key=settings.experiment_key,
            mode=settings.mode,
            online=settings.online,
        )
        if settings.experiment_name is not None:
            self.experiment.set_name(settings.experiment_name)
        self._interval = settings.samples_log_interval
        self._logged: dict[str, int] = {}  # x of each tag's last

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, x in events:
            if tag not in self._logged or x - self._logged[tag] >= self._interval:
                self._logged[tag] = x
                self.experiment.log_metric(name=tag, value=value, step=x)
