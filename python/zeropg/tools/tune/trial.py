"""One run of the script: `python -m zeropg run` with a configuration, until the engine has timed its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeropg.deepspeed.observation.trial import VARIABLE, Report, Sizes, Trial

_TAIL_LINES = 15


class TrialFailed(Exception):
    """A run ended without a report; the text is what it said last."""


class Script:
    """The script that is tuned, and how it is started."""

    def __init__(self, run_options: Sequence[str], command: Sequence[str], seconds: float) -> None:
        """command: the script and its arguments, --deepspeed_config FILE among them. seconds: the limit of one run."""
        self._run_options = list(run_options)
        self._command = list(command)
        self._seconds = seconds

    def sizes(self, config: dict[str, Any]) -> Sizes:
        """The model's. Raises TrialFailed."""
        return Sizes(**self._run(config, warm_up=0, steps=0))

    def time(self, config: dict[str, Any], *, warm_up: int, steps: int) -> Report:
        """Raises TrialFailed."""
        return Report(**self._run(config, warm_up=warm_up, steps=steps))

    def _run(self, config: dict[str, Any], *, warm_up: int, steps: int) -> dict[str, Any]:
        """In a folder below the current one: hosts share that, if there are several."""
        with tempfile.TemporaryDirectory(prefix=".zeropg-tune-", dir=Path.cwd()) as folder:
            file, report = Path(folder) / "ds_config.json", Path(folder) / "report.json"
            file.write_text(json.dumps(config))
            trial = Trial(str(report), warm_up, steps)
            command = [sys.executable, "-m", "zeropg", "run", *self._run_options, *with_config(self._command, file)]
            said = self._finish(command, os.environ | {VARIABLE: json.dumps(asdict(trial))})
            if not report.exists():
                raise TrialFailed("\n".join(said.splitlines()[-_TAIL_LINES:]) or "it ended without training")
            found: dict[str, Any] = json.loads(report.read_text())
            return found

    def _finish(self, command: list[str], environment: dict[str, str]) -> str:
        """Returns what the run says. Raises TrialFailed where it takes too long."""
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is for this process, which then ends the run in order.
        with subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=self._seconds)
            except subprocess.TimeoutExpired:
                process.terminate()  # zeropg run ends all ranks then
                said, _ = process.communicate()
                raise TrialFailed(f"it took more than {self._seconds:g} s (--timeout)") from None
            except BaseException:
                process.terminate()
                process.communicate()
                raise
        return said


def config_argument(command: Sequence[str]) -> str | None:
    """The file that --deepspeed_config names among a script's arguments; None where it is not there."""
    for number, word in enumerate(command):
        if word == "--deepspeed_config" and number + 1 < len(command):
            return command[number + 1]
        if word.startswith("--deepspeed_config="):
            return word.partition("=")[2]
    return None


def with_config(command: Sequence[str], file: Path) -> list[str]:
    """The same arguments with another file."""
    words = list(command)
    for number, word in enumerate(words):
        if word == "--deepspeed_config" and number + 1 < len(words):
            words[number + 1] = str(file)
        elif word.startswith("--deepspeed_config="):
            words[number] = f"--deepspeed_config={file}"
    return words
