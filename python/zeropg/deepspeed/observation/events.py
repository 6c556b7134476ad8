"""`EventWriter`: what an engine tells its monitors of each update."""

from __future__ import annotations

from collections.abc import Mapping

from zeropg.deepspeed.monitor import MonitorMaster
from zeropg.deepspeed.observation.observer import Facts, Observer


class EventWriter(Observer):
    """Writes DeepSpeed's tags, over the samples so far: train_loss, lr and, in fp16, loss_scale."""

    def __init__(self, monitor: MonitorMaster) -> None:
        self._monitor = monitor

    def updated(self, facts: Facts) -> None:
        values = {"train_loss": facts.loss, "lr": facts.lr[0] if facts.lr else None, "loss_scale": facts.loss_scale}
        write_samples(self._monitor, values, facts.total_samples)


def write_samples(monitor: MonitorMaster, values: Mapping[str, object], samples: int) -> None:
    """Writes what is not None as `Train/Samples/...`."""
    known = {name: value for name, value in values.items() if value is not None}
    monitor.note([(f"Train/Samples/{name}", value, samples) for name, value in known.items()])
