"""Facts about this machine that the tools report: CPUs, memory, limits, load, versions. Linux; reads, never sets."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> float:
    """CPUs that this process may use: by affinity, and by its cgroups' limit where that is lower."""
    allowed = len(os.sched_getaffinity(0))
    limit = cgroup_cpu_limit()
    return allowed if limit is None else min(float(allowed), limit)


def cgroup_cpu_limit() -> float | None:
    """The tightest CPU limit of this process's cgroups (v2 or v1), in CPUs; None: unlimited."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        quota, period = (
            quota or read_text(folder / "cpu.cfs_quota_us"),
            period or read_text(folder / "cpu.cfs_period_us"),
        )
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cgroup_memory_limit() -> int | None:
    """The tightest memory limit of this process's cgroups, in bytes; None: unlimited."""
    limits = []
    for folder in _cgroup_folders("memory"):
        text = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes a huge number for "none"
            limits.append(int(text))
    return min(limits, default=None)


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of this machine's memory, as the kernel estimates them."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", read_text(Path("/proc/meminfo")), re.MULTILINE))
    return int(found.get("MemTotal", 0)) * 1024, int(found.get("MemAvailable", 0)) * 1024


def cpu_model() -> str:
    """The processor's name, e.g. "AMD EPYC 9654"."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def busy_cpu_seconds() -> float | None:
    """Seconds that all CPUs together have spent working for anyone since boot; None where the kernel hides it.

    User, system and stolen time. Interrupts are left out: loopback traffic of the one who measures would count there,
    and is not in that process's own times.
    """
    words = read_text(Path("/proc/stat")).partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, _, _, _, _, steal = (int(word) for word in words[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


class OthersLoad:
    """How many CPUs everybody else keeps busy, from construction to `stop`."""

    def __init__(self) -> None:
        self._busy = busy_cpu_seconds()
        self._start = time.monotonic()

    def stop(self, own_cpu_seconds: float) -> float:
        """Returns others' CPUs in use: all work, less `own_cpu_seconds` of who measures, per second of wall clock.

        Where /proc/stat is hidden, the load average stands in (it counts who measures, too).
        """
        seconds = max(time.monotonic() - self._start, 1e-6)
        now = busy_cpu_seconds()
        if self._busy is None or now is None:
            return os.getloadavg()[0]
        return max(0.0, (now - self._busy - own_cpu_seconds) / seconds)


def others_load_now(seconds: float = 1.0) -> float:
    """CPUs that others keep busy during `seconds` in which this process sleeps."""
    load = OthersLoad()
    start = time.process_time()
    time.sleep(seconds)
    return load.stop(time.process_time() - start)


def describe() -> dict[str, Any]:
    """What a figure needs beside it: hardware, limits, load and versions. Values are ready for JSON."""
    total, available = memory_bytes()
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "cpus_online": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "cgroup_cpu_limit": cgroup_cpu_limit(),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "cgroup_memory_limit_bytes": cgroup_memory_limit(),
        "load_average": list(os.getloadavg()),
    }


def commit() -> str:
    """The commit of the source tree that runs, with "+" where it has changes; "" outside of a git checkout."""
    folder = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def _cgroup_folders(controller: str) -> list[Path]:
    """This process's cgroup and those above it: v2's, and v1's of `controller`."""
    folders: list[Path] = []
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUP
        elif controller in controllers.split(","):
            root = _CGROUP / controller
        else:
            continue
        own = root / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return folders


def read_text(path: Path) -> str:
    """The stripped content of a file of the kernel; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
