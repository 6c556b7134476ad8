"""Programs that tests run: when one takes too long, nothing that it started lives on and slows the tests after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
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


@contextlib.contextmanager
def script_on_ranks(script: str, world_size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Python processes that run `script` with their rank as its argument; what still runs at the end is killed.

    Their output and errors are one pipe.
    """
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            command = [sys.executable, "-c", script, str(rank)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            ranks.append(stack.enter_context(process))
            stack.callback(_kill_if_running, process)
        yield ranks


def _kill_if_running(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        kill_with_children(process.pid)


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


def lives(pid: int) -> bool:
    """Zombies, whom somebody else has to bury, do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
