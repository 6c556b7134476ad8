"""DeepSpeed's `runtime.utils`: how much memory a process has."""

from __future__ import annotations

from pathlib import Path

import torch

from zeropg.deepspeed.utils.logging import log_dist

_GIB = 1 << 30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs memory of rank 0, in GiB: resident on the host, and on the device what is allocated and reserved, now and at
    most. Only with `force`, as in DeepSpeed; does not communicate."""
    if not force:
        return
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / _GIB
    text = f"{message}: host {resident:.2f} GiB"
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
        most = torch.cuda.max_memory_allocated() / _GIB, torch.cuda.max_memory_reserved() / _GIB
        text += f"; device {allocated:.2f} (at most {most[0]:.2f}) allocated, {reserved:.2f} ({most[1]:.2f}) reserved"
    log_dist(text)
