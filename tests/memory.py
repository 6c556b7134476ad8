"""What a rank's process holds, in measures that other processes do not change."""

from __future__ import annotations

import ctypes
import os
import time
from typing import NamedTuple


def held_bytes() -> int:
    """Its anonymous pages and its share of shared memory.

    Not its proportional set size: the share of pages that it has from its parent, and of libtorch's, grows with every
    other process that ends or writes to its own copy.
    """
    with open("/proc/self/smaps_rollup") as file:
        memory = dict(line.split(":") for line in file if line.endswith("kB\n"))
    return 1024 * sum(int(memory[kind].split()[0]) for kind in ("Anonymous", "Pss_Shmem"))


class Resources(NamedTuple):
    descriptors: int
    threads: int
    bytes: int


def held_resources() -> Resources:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not held
    return Resources(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), held_bytes())


def expect_no_more_than(before: Resources) -> None:
    """No descriptor, no thread, and less than 4 MiB more, which is less than the arena of a group."""
    limits = Resources(before.descriptors, before.threads, before.bytes + (4 << 20))
    after = held_resources()
    deadline = time.monotonic() + 10  # the threads of the last abort may still be at it
    while any(new > limit for new, limit in zip(after, limits, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)
        after = held_resources()
    assert all(new <= limit for new, limit in zip(after, limits, strict=True)), (before, after)
