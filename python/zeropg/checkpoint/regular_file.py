"""What stands in the place of a file and would be waited for."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path


def check_no_pipe(path: Path) -> None:
    """Raises ValueError where `path` is neither a file nor a directory: to open a pipe waits for whoever writes to it.

    What is not there, or cannot be looked at, is left to whoever opens it.
    """
    with suppress(OSError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"'{path}' is a pipe, a socket or a device; expected a file")
