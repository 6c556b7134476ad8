"""DeepSpeed's `utils.groups`: which ranks have data of their own, and which share layers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zeropg.deepspeed.tensor_parallel.ranks import DATA, TENSORS, current_mesh


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that have data of their own, this one among them; the world where layers are not cut over ranks.

    Raises ValueError where there is no process group yet. An engine's own is its data_parallel_group.
    """
    mesh = current_mesh()
    return dist.distributed_c10d._get_default_group() if mesh is None else mesh.get_group(DATA)


def get_data_parallel_world_size() -> int:
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    return get_data_parallel_group().rank()


def get_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share layers with this one (tensor_parallel); None where none do."""
    mesh = current_mesh()
    return None if mesh is None else mesh.get_group(TENSORS)


def get_model_parallel_world_size() -> int:
    """How many ranks share layers."""
    group = get_model_parallel_group()
    return 1 if group is None else group.size()


def get_model_parallel_rank() -> int:
    group = get_model_parallel_group()
    return 0 if group is None else group.rank()


def _get_sequence_parallel_world_size() -> int:
    """1: sequences are not split over ranks."""
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> None:
    """None: sequences are not split over ranks."""


# Programs call these by the names that DeepSpeed gives them for itself, too.
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = _get_model_parallel_group = get_model_parallel_group


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"[zeropg] deepspeed.utils.groups.{name} is not available: there are groups of ranks with different data, "
        "and of ranks that share layers, alone. Use "
        "torch.distributed's groups and meshes, without an engine"
    )
