"""Ranks that have different parts of the tensors step alike, or all say why not."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeropg
from tests.sharding.offload.test_bad_disk import file_size_limit
from tests.sharding.ranks import equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.tensor_parallel.model import make_mesh, make_sharded, parallelize, whole_parameters

ELSEWHERE = "another part of the model's tensors"


def after_backward(mesh: Any, stage: int) -> tuple[Any, Any]:
    model = make_sharded(mesh, stage=stage)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    loss_of(model, make_batches()[0].chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]).backward()
    return model, optimizer


def refused(model: Any, step: Callable[[], Any], *words: str) -> None:
    """Says so on every rank; nothing is stepped, and the ranks are still together."""
    before = whole_parameters(model)
    with raises(RuntimeError, "step", *words):
        step()
    after = whole_parameters(model)
    assert all(equal(before[name], after[name]) for name in before)


@on_ranks(4)
def test_a_step_with_other_numbers_in_another_part() -> None:
    for shape, stages in {(2, 2): (0, 1, 2, 3), (1, 4): (2,)}.items():
        mesh = make_mesh(*shape)
        for stage in stages:
            model, optimizer = after_backward(mesh, stage)
            optimizer.param_groups[0]["lr"] *= 1 + mesh["tp"].get_local_rank()
            refused(model, optimizer.step, "param groups of other numbers", ELSEWHERE)
            optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.step()


@on_ranks(4)
def test_ranks_of_one_part_that_fail_alone() -> None:
    mesh = make_mesh(2, 2)
    for stage in (0, 1, 2, 3):
        model, optimizer = after_backward(mesh, stage)
        if dist.get_rank() == 3:  # of part 1, whose other rank is 1
            optimizer.param_groups[0]["lr"] = 0.5
        in_part_0 = mesh["tp"].get_local_rank() == 0
        words = (ELSEWHERE, "see their error") if in_part_0 else ("param groups of other numbers",)
        refused(model, optimizer.step, *words)


@on_ranks(4)
def test_a_gradient_that_one_part_has_dropped() -> None:
    mesh = make_mesh(2, 2)
    model, optimizer = after_backward(mesh, stage=1)
    if mesh["tp"].get_local_rank() == 1:
        model.blocks[0].up.bias.grad = None
    refused(model, optimizer.step, "gradients of other parameters", ELSEWHERE)


@on_ranks(4)
def test_clipping_by_other_numbers() -> None:
    mesh = make_mesh(2, 2)
    for stage in (1, 3):
        model, optimizer = after_backward(mesh, stage)
        for max_norm in (1.0 + mesh["tp"].get_local_rank(), 3.0 if dist.get_rank() == 3 else 2.0):
            with raises(ValueError, "clip_grad_norm_", "max_norm is", "expected the same on every rank"):
                zeropg.clip_grad_norm_(model, max_norm)
        zeropg.clip_grad_norm_(model, 1.0)
        optimizer.step()


@on_ranks(4)
def test_replicas_that_load_other_values() -> None:
    """Of one part alone: the ranks of the other part say so too."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "dp", "tp"))
    model = parallelize(make_model(torch.float64), mesh["tp"])
    zeropg.fully_shard(model, mesh=mesh["replicate", "dp"], stage=3)
    with (
        raises(RuntimeError, "writable_shards", "replicas of a slice set different values"),
        zeropg.writable_shards(model) as shards,
    ):
        for _, tensor, _, _ in shards:
            tensor += dist.get_rank() == 3


class WithBuffers(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]))
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("table", distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale = torch.randn_like(self.scale)


@on_ranks(4)
def test_buffers_are_those_of_rank_0() -> None:
    mesh = make_mesh(2, 2)
    for on_meta in (False, True):
        torch.manual_seed(0 if on_meta else dist.get_rank())
        with torch.device("meta" if on_meta else "cpu"):
            model = WithBuffers(mesh["tp"])
        if on_meta:
            model.table = distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)])
        table = model.table.to_local().clone()
        zeropg.fully_shard(model, mesh=mesh["dp"], device="cpu")
        scales: list[Any] = [None] * 4
        dist.all_gather_object(scales, (model.scale, model.table.to_local(), table))
        assert all(equal(scale, scales[0][0]) for scale, _, _ in scales)
        assert all(equal(own, scales[rank % 2][2]) for rank, (_, own, _) in enumerate(scales))


@on_ranks(4)
def test_a_disk_too_full_for_one_parts_masters_is_an_error_on_all(tmp_path: Path) -> None:
    mesh = make_mesh(2, 2)
    is_full = dist.get_rank() == 1
    words = (
        "for masters of unit" if is_full else "rank 1 of all that have parts of the model's tensors could not reserve"
    )
    started = time.monotonic()
    with file_size_limit(16 * 1024 if is_full else resource.RLIM_INFINITY), raises(OSError, words):
        make_sharded(mesh, torch.float32, param_dtype=torch.bfloat16, offload_optimizer=str(tmp_path))
    assert time.monotonic() - started < 20
    make_sharded(mesh, torch.float32, param_dtype=torch.bfloat16, offload_optimizer=str(tmp_path))


@on_ranks(2)
def test_a_disk_that_fails_one_part_is_an_error_on_all(tmp_path: Path) -> None:
    mesh = make_mesh(1, 2)
    model = make_sharded(mesh, torch.float32, stage=3, param_dtype=torch.bfloat16, offload_optimizer=str(tmp_path))
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    for step in range(2):
        loss_of(model, make_batches()[step]).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 1:
        for link in Path("/proc/self/fd").iterdir():
            if os.path.exists(link) and os.readlink(link).startswith(str(tmp_path)):
                os.ftruncate(int(link.name), 0)
    with raises(OSError, "step", "offload", "resume from a checkpoint"):
        optimizer.step()
