"""What a rank's process holds, in measures that other processes do not change."""

from __future__ import annotations


def held_bytes() -> int:
    """Its anonymous pages and its share of shared memory.

    Not its proportional set size: the share of pages that it has from its parent, and of libtorch's, grows with every
    other process that ends or writes to its own copy.
    """
    with open("/proc/self/smaps_rollup") as file:
        memory = dict(line.split(":") for line in file if line.endswith("kB\n"))
    return 1024 * sum(int(memory[kind].split()[0]) for kind in ("Anonymous", "Pss_Shmem"))
