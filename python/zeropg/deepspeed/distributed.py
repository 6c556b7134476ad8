"""The process group that an engine trains over."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_DEFAULT_PORT = 29500
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = _DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes the default process group, unless there is one; one of any backend will do. All ranks must call.

    Args:
        dist_backend: default: "zeropg". "nccl" means zeropg too, which hands CUDA tensors to NCCL.
        auto_mpi_discovery: without effect: rank and world come from the arguments or from torchrun's variables.
        distributed_port: where rank 0 listens if MASTER_PORT does not say.
        timeout, init_method, rank, world_size: as torch's init_process_group has them.
        dist_init_required: False: raise RuntimeError where there is no group, instead of making one.

    Without torchrun's variables and an init_method a group of this process alone is made.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "[zeropg] init_distributed: there is no process group and dist_init_required is False; call "
            'torch.distributed.init_process_group("zeropg") first, or leave it out'
        )
    if init_method is None:
        if "RANK" not in os.environ and rank < 0:
            _check_alone()
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    backend = "zeropg" if dist_backend in (None, "nccl") else dist_backend
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def _check_alone() -> None:
    """Raises RuntimeError where another launcher has started several processes, which would each train alone."""
    for name in _OTHER_LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            raise RuntimeError(
                f"[zeropg] init_distributed: {name} is {os.environ[name]}, but RANK is not set, so each process would "
                "train alone; start them by torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )
