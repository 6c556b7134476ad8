"""What is saved on a mesh of replicas loads on any other, and replicas write nothing twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.sharding.hybrid.training import (
    TWO_HOSTS,
    assert_replicas_are_equal,
    make_mesh,
    over_gloo_in_soak,
    shard,
    step,
    train_alone,
)
from tests.sharding.ranks import close, equal, raises
from tests.small_gpt import make_batches, make_model, make_optimizer
from tests.spawn import Place, run_ranks

SAVED_AFTER = 3
STEPS = 6
STAGES = (0, 1, 2, 3)


def save_in_all_stages(folder: Path) -> None:
    mesh = make_mesh()
    for stage in STAGES:
        model = shard(make_model(torch.float64), mesh, stage=stage)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        for batch in make_batches()[:SAVED_AFTER]:
            step(model, optimizer, batch)
        options = {"extra": {"stage": stage}, "rank_extra": {"rank": dist.get_rank()}}
        zeropg.save_checkpoint(folder / str(stage), model, optimizer, **options)
        pending = zeropg.save_checkpoint(folder / f"{stage}-async", model, optimizer, **options, async_save=True)
        step(model, optimizer, make_batches()[SAVED_AFTER])
        assert pending is not None
        pending.wait()
        # Here, into what has gone on.
        for name in (str(stage), f"{stage}-async"):
            extra, rank_extra = zeropg.load_checkpoint(folder / name, model, optimizer)
            assert (extra, rank_extra) == ({"stage": stage}, {"rank": dist.get_rank()})
            assert_replicas_are_equal(model)
            go_on(model, optimizer)
        whole = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
        assert whole["norm.bias"]["step"] == STEPS
        exps = {name: state["exp_avg"] for name, state in whole.items()}
        first = [exps]
        dist.broadcast_object_list(first, src=0)
        assert all(equal(exps[name], value) for name, value in first[0].items())
        zeropg.save_16bit_weights(model, folder / f"{stage}-exported")
        expected = zeropg.full_state_dict(model, rank0_only=False, dtype=torch.bfloat16)
        if dist.get_rank() == 0:
            from safetensors.torch import load_file

            exported = load_file(folder / f"{stage}-exported" / "model.safetensors")
            assert all(equal(exported[name], expected[name]) for name in exported)
        dist.barrier()
        zeropg.load_pretrained(model, folder / f"{stage}-exported")
        loaded = zeropg.full_state_dict(model, rank0_only=False)
        assert all(equal(loaded[name], expected[name].double()) for name in loaded)
        assert_replicas_are_equal(model)


def go_on(model: Any, optimizer: Any) -> None:
    for batch in make_batches()[SAVED_AFTER:STEPS]:
        step(model, optimizer, batch)
    plain = train_alone(torch.float64, STEPS)[1]
    state = zeropg.full_state_dict(model, rank0_only=False)
    for name, value in plain.items():
        assert close(state[name], value), name


def load_elsewhere(folder: Path, replicas: int, shards: int) -> None:
    mesh = make_mesh(replicas, shards)
    for saved_stage in STAGES:
        stage = (saved_stage + 1) % 4
        model = shard(make_model(torch.float64, seed=5), mesh, stage=stage)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        extra, rank_extra = zeropg.load_checkpoint(folder / str(saved_stage), model, optimizer)
        assert (extra, rank_extra) == ({"stage": saved_stage}, {"rank": dist.get_rank()})
        go_on(model, optimizer)


@over_gloo_in_soak
def test_checkpoints_load_on_other_meshes(rank_pool, backend: str, place: Place, tmp_path: Path) -> None:
    rank_pool(4, backend, place).run(save_in_all_stages, tmp_path, timeout=120)
    rank_pool(4, backend, place).run(load_elsewhere, tmp_path, 4, 1)
    if backend == "zeropg":
        run_ranks(2, load_elsewhere, tmp_path, 1, 2)
        run_ranks(1, load_elsewhere, tmp_path, 1, 1)


def fail_on_one_rank(folder: Path) -> None:
    """The second rank of the second replica cannot open what rank 0 has made."""
    rank, mesh = dist.get_rank(), make_mesh()
    model = shard(make_model(), mesh)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    zeropg.save_checkpoint(folder / "whole", model, optimizer)
    with raises(ValueError, "directory is", "other"):
        zeropg.save_checkpoint(folder / ("other" if rank == 3 else "whole"), model, optimizer)
    with raises(TypeError, "rank 2"):
        zeropg.save_checkpoint(folder / "whole", model, optimizer, rank_extra=object() if rank == 2 else None)
    with raises(FileNotFoundError, "rank 3"):
        zeropg.load_checkpoint(folder / ("missing" if rank == 3 else "whole"), model, optimizer)
    before = zeropg.full_state_dict(model, rank0_only=False)
    with raises(ValueError, "rank 1", "max_shard_size"):
        zeropg.save_16bit_weights(model, folder / "out", max_shard_size="much" if rank == 1 else "5GB")
    assert not os.path.exists(folder / "out")
    zeropg.load_checkpoint(folder / "whole", model, optimizer)
    after = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(before[name], after[name]) for name in before)


def test_what_fails_on_one_rank_fails_on_all(rank_pool, tmp_path: Path) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(fail_on_one_rank, tmp_path)


@pytest.mark.parametrize("stage", [2])
def test_replicas_with_the_offload_of_their_own_disks(rank_pool, tmp_path: Path, stage: int) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(train_offloaded, tmp_path, stage)


def train_offloaded(folder: Path, stage: int) -> None:
    mesh, states = make_mesh(), []
    for offload in (None, folder):
        model = shard(make_model(), mesh, stage=stage, param_dtype=torch.bfloat16, offload_optimizer=offload)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        for batch in make_batches()[:2]:
            step(model, optimizer, batch)
        assert_replicas_are_equal(model)
        states.append(zeropg.full_state_dict(model, rank0_only=False))
    assert all(equal(states[1][name], value) for name, value in states[0].items())
