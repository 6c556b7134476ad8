"""`csv_monitor`: one file per tag, with rows of x and value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from zeropg.deepspeed.config.blocks.observation import FileMonitor
from zeropg.deepspeed.monitor.monitor import Event


class CsvMonitor:
    """Appends to `output_path/job_name/Train_Samples_lr.csv`, whose first row is "step,lr".

    Rows are on the disk after each write, so a killed job leaves whole ones. A run that goes on appends to the files
    of the one before.
    """

    def __init__(self, settings: FileMonitor) -> None:
        """Makes the folder. Raises OSError."""
        self.directory = Path(settings.output_path, settings.job_name)
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, x in events:
            path = self.directory / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    rows.writerow(["step", tag.rpartition("/")[2]])
                rows.writerow([x, value])
