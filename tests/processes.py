"""Programs that tests run: when one takes too long, nothing that it started lives on and slows the tests after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path


def run_program(
    command: list[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, whose limit would end the launcher alone: its ranks would go on."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            kill_with_children(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_with_children(pid: int) -> None:
    """Kills a child and all that it started, also in other sessions, where torchrun puts its ranks."""
    family = [pid]
    for member in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(member, signal.SIGSTOP)  # so that it starts no more
            for task in Path(f"/proc/{member}/task").iterdir():
                family += [int(child) for child in (task / "children").read_text().split()]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
