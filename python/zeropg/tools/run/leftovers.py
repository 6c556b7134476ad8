"""What ranks have started and would leave behind: found by a mark in its environment, in whatever session it is."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "ZEROPG_RUN_FOLDER"
_ROUNDS = 100
_PAUSE_SECONDS = 0.02


def kill_marked(value: str) -> None:
    """Kills each process of this host that was started with MARK=value, and what it starts meanwhile.

    torchrun ends the process groups of ranks that still live, and not what a rank that has failed had started.
    """
    for _ in range(_ROUNDS):
        found = _marked(f"{MARK}={value}".encode())
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


def _marked(entry: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # somebody else's, or gone
            if int(folder.name) != os.getpid() and entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
