"""Which CPUs each rank of a host is bound to."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from zeropg.tools.machine import read_text

_CPU_FOLDER = Path("/sys/devices/system/cpu")


def parse_cpu_list(text: str) -> list[int]:
    """ "1,3-5" -> [1, 3, 4, 5], as DeepSpeed's --bind_core_list. Raises ValueError where it is something else."""
    cpus: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part!r} in {text!r}; expected CPUs like 0,2 or ranges like 4-7")
        cpus += range(int(found[1]), int(found[2] or found[1]) + 1)
    if len(set(cpus)) < len(cpus):
        raise ValueError(f"{text!r} names a CPU twice")
    return cpus


def cores_of_this_host(cpus: Collection[int] | None = None) -> list[list[int]]:
    """The CPUs of each physical core, near ones beside each other: by socket, then by number.

    cpus: which ones; default: those that this process may use. Raises ValueError where it may not use one of them.
    """
    usable = os.sched_getaffinity(0)
    absent = set(cpus or ()) - usable
    if absent:
        raise ValueError(f"CPU {min(absent)} is none of those that this process may use: {sorted(usable)}")
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(usable if cpus is None else cpus):
        topology = _CPU_FOLDER / f"cpu{cpu}" / "topology"
        socket, core = (read_text(topology / name) for name in ("physical_package_id", "core_id"))
        known = socket.isdigit() and core.isdigit()
        cores.setdefault((int(socket), int(core)) if known else (0, cpu), []).append(cpu)
    return [cores[key] for key in sorted(cores)]


def divide(cores: Sequence[Sequence[int]], ranks: int) -> list[list[list[int]]]:
    """Returns the cores of each rank: neighbours, as many for each; the rest stays free.

    Raises ValueError where there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        raise ValueError(f"{ranks} ranks cannot be bound to {len(cores)} cores; leave --bind_cores out, or use fewer")
    return [[list(core) for core in cores[rank * each : (rank + 1) * each]] for rank in range(ranks)]
