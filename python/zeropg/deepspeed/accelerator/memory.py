"""How much memory is in use: on the GPU what its tensors take, else what this process has resident."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _resident() -> int:
    """Bytes; pages that ranks of a node share count in each."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Memory:
    """Bytes. Without a GPU the most is the most that these calls have seen since the last reset, as in DeepSpeed."""

    _most = 0

    current_device: Callable[[], int]

    def empty_cache(self) -> None:
        """Gives memory that no tensor uses back to the GPU."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if torch.cuda.is_available() else self._look()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if torch.cuda.is_available() else self._look_for_most()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if torch.cuda.is_available() else self._look()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if torch.cuda.is_available() else self._look_for_most()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Lets the most begin anew, of both kinds."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats(device_index)
        self._most = 0

    # Names of old.
    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Returns torch.cuda's; without a GPU now and at most under its keys."""
        if torch.cuda.is_available():
            return torch.cuda.memory_stats(device_index)
        now = self._look()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._most}

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the GPU, or of this machine."""
        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(self._index(device_index)).total_memory
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()

    def available_memory(self, device_index: int | None = None) -> int:
        """What is free of that; on this machine what could be freed, too."""
        if torch.cuda.is_available():
            return torch.cuda.mem_get_info(self._index(device_index))[0]
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))

    def _index(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index

    def _look(self) -> int:
        now = _resident()
        self._most = max(self._most, now)
        return now

    def _look_for_most(self) -> int:
        self._look()
        return self._most
