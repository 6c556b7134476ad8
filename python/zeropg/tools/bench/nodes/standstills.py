"""A process that stands still at times, as one does whose machine has other work. Only Python's own modules."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

LENGTH, EVERY = 0.05, 1.0  # seconds


@contextlib.contextmanager
def standstills() -> Iterator[None]:
    """Meanwhile this process stands still for LENGTH in EVERY second; afterwards it certainly goes on."""
    with subprocess.Popen([sys.executable, "-S", __file__], stdin=subprocess.PIPE) as helper:
        try:
            yield
        finally:
            assert helper.stdin is not None
            helper.stdin.close()


def _stop_parent() -> None:
    """Until the standard input ends, which this process looks at only while the parent runs."""
    parent = os.getppid()
    while not select.select([sys.stdin], [], [], EVERY - LENGTH)[0]:
        os.kill(parent, signal.SIGSTOP)
        time.sleep(LENGTH)
        os.kill(parent, signal.SIGCONT)


if __name__ == "__main__":
    _stop_parent()
