"""An advisory lock on a directory: who writes into it does so one after the other."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path


def take_directory_lock(directory: Path, seconds: float, *, held: str) -> int:
    """Waits for the lock; returns a descriptor that holds it until it is closed. Not held where there are no locks.

    Raises OSError, with what `held` says of who has it, after `seconds`.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(errno.EWOULDBLOCK, f"{held} (for more than {seconds:g} s)") from error
            time.sleep(0.05)
        except OSError:
            return descriptor  # a file system without locks
