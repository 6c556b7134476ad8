"""Tests marked `alone` have the machine to themselves; all others share it with those of pytest-xdist's other workers.

Two locks, for every run over this tree: who holds `machine` runs a test, alone or beside others; who waits for it holds
`queue`, so that a test that wants the machine alone is not overtaken for ever by tests that share it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUEUE = Path(__file__)
MACHINE = QUEUE.with_name("conftest.py")


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    with _locked(QUEUE, fcntl.LOCK_EX) as queue, _locked(MACHINE, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@contextmanager
def _locked(path: Path, mode: int) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, mode)
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still hold the file open
        os.close(file)
