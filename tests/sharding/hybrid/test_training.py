"""A model that is sharded inside groups of ranks and replicated across them trains as a plain process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zeropg
from tests.sharding.hybrid.training import make_mesh, on_both_backends, shard, train, train_alone
from tests.sharding.module.test_same_losses import Run, relative_difference
from tests.small_gpt import make_model
from tests.spawn import Place, SeparateHosts, run_ranks


def train_all(dtype: torch.dtype) -> dict[str, Run]:
    torch.set_num_threads(1)
    mesh = make_mesh()
    runs = {f"stage {stage}": train(stage, dtype, mesh) for stage in (0, 1, 2, 3)}
    runs |= {f"stage {stage}, accumulated": train(stage, dtype, mesh, accumulate=3) for stage in (0, 1, 2, 3)}
    runs["whole units"] = train(3, dtype, mesh, reshard_after_forward=False)
    runs["four replicas of one shard"] = train(3, dtype, make_mesh(4, 1))
    runs["four replicas in stage 2"] = train(2, dtype, make_mesh(4, 1))
    runs["one replica of four shards"] = train(3, dtype, make_mesh(1, 4))
    return runs


@on_both_backends
def test_all_stages_train_as_one_process(rank_pool, backend: str, place: Place) -> None:
    runs = rank_pool(4, backend, place).run(train_all, torch.float64, timeout=120)
    plain = train_alone(torch.float64)
    for of_rank in runs:
        for name, run in of_rank.items():
            assert relative_difference(run, plain) < 1e-12, name
    for name, run in runs[0].items():
        assert all(other[name][0] == run[0] for other in runs), f"{name}: ranks know different losses"


def train_on_a_part_of_the_world(dtype: torch.dtype, folder: Path) -> dict[str, Run]:
    """Rank 4 trains nothing, and makes no groups beside those that all ranks make."""
    torch.set_num_threads(1)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    runs = {}
    if dist.get_rank() < 4:
        for stage in (1, 3):
            runs[f"stage {stage}"] = train(stage, dtype, mesh)
        model = shard(make_model(dtype), mesh)
        before = zeropg.full_state_dict(model, rank0_only=False)
        pending = zeropg.save_checkpoint(folder, model, async_save=True)
        assert pending is not None
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.norm.weight.zero_()
        zeropg.load_checkpoint(folder, model)
        assert all(torch.equal(before[key], value) for key, value in zeropg.full_state_dict(model).items())
    if dist.get_backend() == "zeropg":
        ones = torch.ones(1)
        dist.all_reduce(ones, group=dist.new_group())
        assert ones == 5
    return runs


@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
def test_a_mesh_may_be_a_part_of_the_world(backend: str, tmp_path: Path) -> None:
    place = SeparateHosts(hosts=(0, 0, 1, 1, 2))
    runs = run_ranks(5, train_on_a_part_of_the_world, torch.float64, tmp_path, backend=backend, place=place)
    plain = train_alone(torch.float64)
    for of_rank in runs[:4]:
        for name, run in of_rank.items():
            assert relative_difference(run, plain) < 1e-12, name
