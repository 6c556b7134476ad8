"""`tensorboard`: event files, by torch.utils.tensorboard."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeropg.deepspeed.config.blocks.observation import FileMonitor
from zeropg.deepspeed.monitor.monitor import Event, package


class TensorBoardMonitor:
    """Writes scalars into `output_path/job_name`, flushed after each write. `summary_writer` is torch's."""

    def __init__(self, settings: FileMonitor) -> None:
        """Opens the file. Raises RuntimeError without the package and OSError."""
        writer = package("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self.summary_writer = writer(log_dir=os.path.join(settings.output_path, settings.job_name))

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, x in events:
            self.summary_writer.add_scalar(tag, value, x)
        self.summary_writer.flush()
