"""DeepSpeed's `comm`: torch.distributed, what DeepSpeed adds to it, and the summary of `comms_logger`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import *  # noqa: F403
from torch.distributed import ProcessGroup, ReduceOp, Work, distributed_c10d, get_process_group_ranks
from torch.distributed import all_gather_into_tensor as allgather_fn
from torch.distributed import all_reduce as _all_reduce
from torch.distributed import is_initialized as is_initialized
from torch.distributed import reduce_scatter_tensor as reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeropg.deepspeed.distributed import init_distributed as init_distributed
from zeropg.deepspeed.observation.comms_logger import log_summary as log_summary
from zeropg.deepspeed.unavailable import COMM

reduce_scatter_fn = reduce_scatter_tensor


def get_local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_group() -> ProcessGroup:
    """The group of all ranks. Raises ValueError where there is none yet."""
    return distributed_c10d._get_default_group()


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The global ranks of a group's members, in its order; default: all."""
    return get_process_group_ranks(group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks, on the devices that the default group serves. All ranks must call."""
    kinds = {device.type for device in get_world_group()._device_types}
    is_on_gpu = "cuda" in kinds and torch.cuda.is_available()
    return init_device_mesh("cuda" if is_on_gpu else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names)


def inference_all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """all_reduce, which is as fast. All ranks of the group must call."""
    _all_reduce(tensor, op, group)


def all_gather_coalesced(  # type: ignore[no-redef]  # torch's of this name takes lists of lists
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """all_gather_into_tensor of each pair, one after the other. All ranks of the group must call.

    Returns the last one's work with async_op=True. Raises ValueError for sequences of different lengths, or empty ones.
    """
    if not output_tensors or len(output_tensors) != len(input_tensors):
        raise ValueError(
            f"[zeropg] all_gather_coalesced: got {len(output_tensors)} outputs and {len(input_tensors)} inputs; "
            "expected as many of both, at least one"
        )
    pairs = zip(output_tensors, input_tensors, strict=True)
    works: list[Any] = [allgather_fn(output, own, group, async_op=True) for output, own in pairs]
    if async_op:
        return works[-1]  # type: ignore[no-any-return]
    for work in works:
        work.wait()
    return None


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return True


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"[zeropg] deepspeed.comm.{name} is not available: {COMM.get(name, 'torch.distributed has what there is')}"
    )
