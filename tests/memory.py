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
    return _bytes_of("Anonymous", "Pss_Shmem")


def used_bytes() -> int:
    """held_bytes without what was freed and the allocator has kept."""
    ctypes.CDLL(None).malloc_trim(0)
    return held_bytes()


def _bytes_of(*kinds: str) -> int:
    with open("/proc/self/smaps_rollup") as file:
        memory = dict(line.split(":") for line in file if line.endswith("kB\n"))
    return 1024 * sum(int(memory[kind].split()[0]) for kind in kinds)


class Resources(NamedTuple):
    descriptors: int
    threads: int
    shared_bytes: int  # mapped: what is resident of them counts more where another process, which had them too, dies
    private_bytes: int


def held_resources() -> Resources:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not held
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file if "/memfd:" in line]
    return Resources(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        shared_bytes=sum(int(end, 16) - int(start, 16) for start, end in ranges),
        private_bytes=_bytes_of("Anonymous"),
    )


def expect_no_more_than(before: Resources, once_bytes: int = 4 << 20) -> None:
    """No descriptor, no thread, no shared memory, and at most `once_bytes` of memory that is taken but once."""
    limits = before._replace(private_bytes=before.private_bytes + once_bytes)
    after = held_resources()
    deadline = time.monotonic() + 10  # the threads of the last abort may still be at it
    while any(new > limit for new, limit in zip(after, limits, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)
        after = held_resources()
    assert all(new <= limit for new, limit in zip(after, limits, strict=True)), (before, after)
