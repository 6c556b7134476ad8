"""Which ranks share layers, and which have data of their own: one mesh for all models of a process."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeropg.deepspeed.config.batch import data_parallel_size

DATA, TENSORS = "data_parallel", "tensor_parallel"
_made: tuple[dist.ProcessGroup, DeviceMesh] | None = None


def current_mesh() -> DeviceMesh | None:
    """Returns the mesh (DATA, TENSORS) of this process group's world; None where no layer is cut."""
    if _made is None or not dist.is_initialized() or _made[0] is not dist.distributed_c10d._get_default_group():
        return None
    return _made[1]


def mesh_over(device_type: str, size: int) -> DeviceMesh:
    """Returns the mesh whose rows are `size` neighbouring ranks, which share layers. All ranks must call.

    Raises ValueError where `size` does not divide the ranks, or another model of the process has another one.
    """
    global _made
    mesh = current_mesh()
    if mesh is None:
        shape = data_parallel_size(dist.get_world_size(), size), size
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=(DATA, TENSORS))
        _made = dist.distributed_c10d._get_default_group(), mesh
    if mesh.size(1) != size or mesh.device_type != device_type:
        raise ValueError(
            f"layers are to be cut over {size} ranks ({device_type}), and those of another model are cut over "
            f"{mesh.size(1)} ({mesh.device_type}); expected the same for all models of a process"
        )
    return mesh
