"""Training on a mesh of replicas and shards, beside a plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeropg
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import THIS_MACHINE, SeparateHosts

# Each replica is one host: its ranks share memory over zeropg, and nothing over gloo.
TWO_HOSTS = SeparateHosts(hosts=(0, 0, 1, 1))
on_both_backends, over_gloo_in_soak = (
    pytest.mark.parametrize(
        ("backend", "place"),
        [("zeropg", TWO_HOSTS), pytest.param("gloo", THIS_MACHINE, marks=marks)],
        ids=["zeropg on two hosts", "gloo"],
    )
    for marks in ((), pytest.mark.soak)
)

Run = tuple[list[float], dict[str, torch.Tensor]]


def make_mesh(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    return zeropg.fully_shard(model, mesh=mesh or make_mesh(), **options)


def own_part(batch: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return batch.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def step(model: Any, optimizer: Any, batch: torch.Tensor, accumulate: int = 1, clip: float = 1.0) -> float:
    """Loss of the global batch; every rank takes its own part, in micro-batches of which the last one reduces."""
    group = model._zeropg.process_group
    total = torch.zeros((), dtype=torch.float64)
    for index, part in enumerate(own_part(batch, group).chunk(accumulate)):
        loss = loss_of(model, part) / accumulate
        if index + 1 < accumulate:
            with zeropg.no_sync(model):
                loss.backward()
        else:
            loss.backward()
        total += loss.detach().double()
    zeropg.clip_grad_norm_(model, clip)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total, group=group)
    return total.item() / group.size()


def train(stage: int, dtype: torch.dtype, mesh: DeviceMesh, steps: int = 6, accumulate: int = 1, **options: Any) -> Run:
    """Losses and the final parameters."""
    rank = dist.get_rank()
    model = shard(make_model(dtype, seed=0 if rank == 0 else 99 + rank), mesh, stage=stage, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    losses = [step(model, optimizer, batch, accumulate) for batch in make_batches()[:steps]]
    assert_replicas_are_equal(model)
    state = zeropg.full_state_dict(model, rank0_only=False)
    return losses, {name: state[name] for name, _ in model.named_parameters()}


def train_alone(dtype: torch.dtype, steps: int = 6) -> Run:
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    losses = []
    for batch in make_batches()[:steps]:
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_replicas_are_equal(model: Any) -> None:
    """To the bit: what forwards read, the masters and the buffers."""
    state = zeropg.full_state_dict(model, rank0_only=False)
    with zeropg.full_parameters(model):
        state |= {f"seen {name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, value in state.items():
        first = value.clone()
        dist.broadcast(first, src=0, group=model._zeropg.process_group)
        assert torch.equal(first, value), f"{name} differs from that of rank 0"
