"""DeepSpeed's `runtime.utils`: how much memory a process has."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GIB = 1 << 30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints memory of rank 0, in GiB, if `force`, as in DeepSpeed: resident on the host, and on the device what is
    allocated and reserved, now and at most. Does not communicate."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / _GIB
    text = f"{message}: host {resident:.2f} GiB"
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
        most = torch.cuda.max_memory_allocated() / _GIB, torch.cuda.max_memory_reserved() / _GIB
        text += f"; device {allocated:.2f} (at most {most[0]:.2f}) allocated, {reserved:.2f} ({most[1]:.2f}) reserved"
    print(f"[zeropg] {text}", file=sys.stderr)


def __getattr__(name: str) -> Any:
    instead = "torch has the rest of what DeepSpeed's helpers do"
    if "norm" in name:
        instead = "use zeropg.clip_grad_norm_(engine.module, max_norm), or engine.get_global_grad_norm()"
    raise AttributeError(f"[zeropg] deepspeed.runtime.utils.{name} is not available: {instead}")
