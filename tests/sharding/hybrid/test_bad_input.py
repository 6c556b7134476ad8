"""Meshes that cannot be used are an error on every rank, and nothing waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeropg
from tests.sharding.hybrid.training import TWO_HOSTS, make_mesh, shard
from tests.sharding.ranks import raises


def refuse_everything() -> None:
    rank = dist.get_rank()
    hybrid = make_mesh()

    with raises(ValueError, "the mesh has 3 dimensions", "mesh['replicate', 'shard']"):
        shard(nn.Linear(3, 3), init_device_mesh("cpu", (2, 1, 2)))
    with raises(ValueError, "both mesh and process_group"):
        shard(nn.Linear(3, 3), hybrid, process_group=dist.group.WORLD)
    with raises(TypeError, "mesh is a tuple; expected a DeviceMesh"):
        shard(nn.Linear(3, 3), (2, 2))

    part = DeviceMesh("cpu", [[0, 1]])
    if rank < 2:
        assert shard(nn.Linear(3, 3), part, stage=2)._zeropg.world_size == 2
    else:
        with raises(ValueError, f"rank {rank}/4", "this rank is not in the mesh [[0, 1]]"):
            shard(nn.Linear(3, 3), part)

    apart = make_mesh(4, 1)
    with raises(ValueError, "mesh=[[0], [1], [2], [3]]", "mesh=[[0, 1], [2, 3]]"):
        shard(nn.Linear(3, 3), hybrid if rank != 2 else apart)
    with raises(ValueError, "mesh=[[0, 1, 2, 3]]", "mesh=[[0, 1], [2, 3]]"):
        zeropg.fully_shard(nn.Linear(3, 3), mesh=hybrid if rank != 3 else None)

    with raises(ValueError, "the mesh is over 'meta' devices, and the model is on cpu"):
        shard(nn.Linear(3, 3), init_device_mesh("meta", (2, 2)))
    with raises(ValueError, "[1, 0]" if rank < 2 else "[3, 2]", "expected ranks in ascending order"):
        shard(nn.Linear(3, 3), DeviceMesh("cpu", [[1, 0], [3, 2]]))

    plan = zeropg.compression.Plan(gradients=zeropg.compression.BlockQuant(8), weights=zeropg.compression.BlockQuant(8))
    if dist.get_backend() == "zeropg":
        with raises(NotImplementedError, "weights= of the plan is not available on a mesh that replicates"):
            shard(nn.Linear(64, 64), hybrid, compression=plan)
    else:
        with raises(ValueError, "compression needs a group of zeropg"):
            shard(nn.Linear(64, 64), hybrid, compression=plan)

    model = nn.Linear(3, 3 if rank < 3 else 4)
    with raises(ValueError, "rank 3 has 'weight' [4, 3]"):
        shard(model, hybrid)
    if rank == 1:
        model = nn.Identity()
    with raises(ValueError, "has no parameters to shard" if rank == 1 else "rank 1 raised ValueError"):
        shard(model if rank == 1 else nn.Linear(3, 3), hybrid)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == 4


@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
def test_meshes_that_cannot_be_used_are_an_error_on_every_rank(rank_pool, backend: str) -> None:
    rank_pool(4, backend, TWO_HOSTS).run(refuse_everything)
