"""The process groups that `fully_shard` shards and replicates over, from what the user passes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from zeropg._native import _C
from zeropg.backend import group_across, group_like, unwrapped_backend


def groups_of(mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None) -> _C.RankGroups:
    """Returns the groups of one model. Collective where a mesh of two dimensions is not the world.

    Raises ValueError for what cannot be sharded over, TypeError for something that is no DeviceMesh.
    """
    if mesh is not None and process_group is not None:
        raise ValueError("[zeropg] fully_shard: got both mesh and process_group; pass one of them.")
    if mesh is not None:
        return _of_mesh(mesh)
    if process_group is None:
        if not dist.is_initialized():
            raise ValueError(
                "[zeropg] fully_shard: torch.distributed is not initialised; call "
                'torch.distributed.init_process_group("zeropg") first (under torchrun, also with one process).'
            )
        process_group = dist.distributed_c10d._get_default_group()
    return _C.RankGroups(process_group, process_group, None)


def described(groups: _C.RankGroups, mesh: DeviceMesh | None) -> str:
    """What must be the same on all ranks: which ranks hold which copy of the model."""
    if groups.replicas is None or mesh is None:
        return str([dist.get_process_group_ranks(groups.everybody)])
    return str(mesh.mesh.tolist())


def reduction_groups(groups: _C.RankGroups, stage: int, device: torch.device) -> _C.RankGroups:
    """Further groups of the same ranks, for gradients, where these must not queue up between other operations.

    These are gathers of units, and between replicas whatever ranks agree upon while a slice is on its second hop.
    """
    shards, replicas = groups.shards, groups.replicas
    if stage == 3 and shards.size() > 1 and not shares_memory(shards, device):
        shards = group_like(shards, device)
    if replicas is None:
        return _C.RankGroups(shards, shards, None)
    if stage >= 2 and shards.size() > 1:
        replicas = group_like(replicas, device)
    return _C.RankGroups(groups.everybody, shards, replicas)


def store_of(groups: _C.RankGroups, reductions: _C.RankGroups) -> Store | None:
    """The store of this model alone, where it has a group of its own for reductions."""
    if reductions.shards is groups.shards:
        return None
    return dist.distributed_c10d._get_process_group_store(reductions.shards)


def shares_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether stage 3 needs no gathers."""
    backend = unwrapped_backend(group, device)
    return device.type == "cpu" and isinstance(backend, _C.ProcessGroupZero) and len(backend.topology().nodes) == 1


def shares_gathered(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a node have one copy of what stage 3 makes whole; otherwise each has its own."""
    backend = unwrapped_backend(group, device)
    is_zeropg = device.type == "cpu" and isinstance(backend, _C.ProcessGroupZero)
    return is_zeropg and len(backend.topology().nodes) < group.size()


def _of_mesh(mesh: DeviceMesh) -> _C.RankGroups:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"[zeropg] fully_shard: mesh is a {type(mesh).__name__}; expected a DeviceMesh.")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"[zeropg] fully_shard: the mesh has {mesh.ndim} dimensions; expected one, to shard over, or two, to "
            "replicate over and to shard over: pass a slice such as mesh['dp'] or mesh['replicate', 'shard']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"[zeropg rank {dist.get_rank()}/{dist.get_world_size()}] fully_shard: this rank is not in the mesh "
            f"{mesh.mesh.tolist()}; call fully_shard on the mesh's ranks alone."
        )
    if mesh.ndim == 1:
        group = mesh.get_group()
        return _C.RankGroups(group, group, None)
    replicas, shards = mesh.get_group(0), mesh.get_group(1)
    if replicas.size() == 1:
        return _C.RankGroups(shards, shards, None)
    return _C.RankGroups(_everybody(mesh, shards, replicas), shards, replicas)


def check_mesh(mesh: DeviceMesh | None, device: torch.device) -> None:
    """Raises ValueError for a mesh over another kind of device, or whose groups would mix slices up."""
    if mesh is None:
        return
    if mesh.device_type != device.type:
        raise ValueError(
            f"[zeropg] fully_shard: the mesh is over {mesh.device_type!r} devices, and the model is on {device}; "
            "expected a mesh over the model's kind of device."
        )
    if mesh.ndim == 2:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # groups_of has checked it
        lines = mesh.mesh[:, coordinate[1]].tolist(), mesh.mesh[coordinate[0]].tolist()
        for dimension, line in enumerate(lines):
            ranks = dist.get_process_group_ranks(mesh.get_group(dimension))
            if list(ranks) != line:  # torch sorts the ranks of a group
                raise ValueError(
                    f"[zeropg] fully_shard: the mesh {mesh.mesh.tolist()} has ranks {line} in a row or column, and "
                    f"their group has the order {ranks}; expected ranks in ascending order, since each keeps the slice "
                    "of its number in the group. Make the mesh by init_device_mesh."
                )


def _everybody(mesh: DeviceMesh, shards: dist.ProcessGroup, replicas: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return dist.distributed_c10d._get_default_group()
    return group_across(shards, replicas, ranks, torch.device(mesh.device_type))
