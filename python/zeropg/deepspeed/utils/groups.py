"""DeepSpeed's `utils.groups`: which ranks share what. All parallelism is over data, and its group is the world."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def get_data_parallel_group() -> dist.ProcessGroup:
    """The group of all ranks. Raises ValueError where there is none yet. An engine's own is its data_parallel_group."""
    return dist.distributed_c10d._get_default_group()


def get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    return dist.get_rank()


def get_model_parallel_world_size() -> int:
    """1: no tensor is split over ranks."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> None:
    """None: sequences are not split over ranks."""


# Programs call these by the names that DeepSpeed gives them for itself, too.
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"[zeropg] deepspeed.utils.groups.{name} is not available: ranks of an engine share nothing but data. Use "
        "torch.distributed's groups and meshes, without an engine"
    )
