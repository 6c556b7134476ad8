"""The process group that a model is sharded over, as accelerate counts its processes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def need_process_group(processes: int, what: str) -> None:
    """Makes a group of this process alone where there is no default group and accelerate knows one process.

    Args:
        processes: how many accelerate counts.
        what: what asks, for errors.

    Raises ValueError where accelerate counts other processes than the default group has: each rank would take all
    data, as if it were alone.
    """
    if not dist.is_initialized() and processes == 1:
        dist.init_process_group("zeropg", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != processes:
        raise ValueError(
            f"[zeropg] {what}: the process group has {dist.get_world_size()} ranks, but accelerate counts {processes} "
            "processes, so each rank would train on all data. On CPUs say so to accelerate: Accelerator(cpu=True), "
            "or TrainingArguments(use_cpu=True); start the ranks by torchrun, and make the group before"
        )
