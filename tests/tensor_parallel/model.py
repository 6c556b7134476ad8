"""A small GPT whose matrices are split over some ranks, and whose last norm works on a part of the sequence each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropg
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer

Run = tuple[list[float], dict[str, torch.Tensor], list[float]]


class SequenceNorm(nn.Module):
    """A norm whose parameters are on all ranks, and get a part of their gradient from each."""

    def __init__(self, norm: nn.LayerNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
        self.bias = nn.Parameter(distribute_tensor(norm.bias.detach(), mesh, [Replicate()]))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        normed = nn.functional.layer_norm(part, (x.shape[-1],), self.weight, self.bias)
        return normed.full_tensor()


def parallelize(model: Any, mesh: DeviceMesh) -> Any:
    """Over a mesh of one dimension. Embedding and head stay one parameter, of which the ranks have 61 rows together."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.attention": ColwiseParallel(output_layouts=Replicate()),
            f"blocks.{index}.projection": RowwiseParallel(input_layouts=Replicate()),
            f"blocks.{index}.up": ColwiseParallel(),
            f"blocks.{index}.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embedding.weight
    model.norm = SequenceNorm(model.norm, mesh)
    return model


def make_mesh(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def make_sharded(mesh: DeviceMesh, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Rank 0's values count: other ranks have others at first."""
    model = parallelize(make_model(dtype, seed=0 if dist.get_rank() == 0 else 99 + dist.get_rank()), mesh["tp"])
    return zeropg.fully_shard(model, mesh=mesh["dp"], **options)


def step(model: Any, optimizer: Any, batch: torch.Tensor, mesh: DeviceMesh, clip: float = 1.0) -> tuple[float, float]:
    """The loss of the global batch, of which each row of the mesh takes its part; and the norm of the gradients."""
    dp = mesh["dp"]
    part = batch.chunk(dp.size())[dp.get_local_rank()]
    loss = loss_of(model, part)
    loss.backward()
    norm = zeropg.clip_grad_norm_(model, clip)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total, group=dp.get_group())
    return total.item() / dp.size(), norm.item()


def whole_parameters(model: Any) -> dict[str, torch.Tensor]:
    with zeropg.full_parameters(model):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


def train(mesh: DeviceMesh, dtype: torch.dtype, steps: int = 5, **options: Any) -> Run:
    model = make_sharded(mesh, dtype, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    pairs = [step(model, optimizer, batch, mesh) for batch in make_batches()[:steps]]
    return [loss for loss, _ in pairs], whole_parameters(model), [norm for _, norm in pairs]


def train_alone(dtype: torch.dtype, steps: int = 5) -> Run:
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for batch in make_batches()[:steps]:
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def difference(a: Run, b: Run) -> float:
    """The largest relative one of losses, parameters and norms."""
    numbers = max(abs(x - y) / abs(y) for x, y in zip(a[0] + a[2], b[0] + b[2], strict=True))
    parameters = max(((a[1][name] - b[1][name]).norm() / b[1][name].norm()).item() for name in b[1])
    return max(numbers, parameters)
