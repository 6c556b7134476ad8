"""What of torch stands on a process group, small and on two ranks: results equal gloo's, or what one process computes.

DDP with its hooks is in test_ddp.py, FSDP2, DTensor and their checkpoints in test_fsdp2.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.spawn import RankPool


@pytest.fixture(scope="module")
def run(rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(2).run


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp1(group: Any) -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        make_model(), process_group=group, device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True,
    )  # fmt: skip
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def zero_redundancy(group: Any) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(make_model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    losses = train(model, optimizer)
    optimizer.consolidate_state_dict()
    return losses


def join(group: Any) -> list[float]:
    from torch.distributed.algorithms.join import Join

    model = DDP(make_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Join([model]):
        for step in range(2 + 3 * dist.get_rank()):  # uneven inputs
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def model_averaging(group: Any) -> list[float]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = make_model()
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, process_group=group)
    )
    return train(model, optimizer, 4)


def pipeline(group: Any) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank(group)
    whole = make_model()
    part = whole[:2] if rank == 0 else whole[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.MSELoss())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=torch.zeros(8, 4), losses=losses)
    gradients = [parameter.grad.sum().item() for parameter in part.parameters() if parameter.grad is not None]
    return [loss.item() for loss in losses] + gradients


def tensor_parallel(group: Any) -> list[float]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    loss = model(x).square().mean()
    loss.backward()
    return [loss.item()]


def autograd_collectives(group: Any) -> list[float]:
    from torch.distributed.nn.functional import all_gather, all_reduce, all_to_all_single, reduce_scatter

    rank = dist.get_rank(group)
    x = (torch.arange(4.0) + rank).requires_grad_()
    gathered = torch.cat(all_gather(x * 2, group=group))
    reduced = all_reduce(x.square(), group=group)
    scattered = reduce_scatter(torch.empty(2), [x[:2] * 3, x[2:] * 5], group=group)
    exchanged = all_to_all_single(torch.empty(4), x * 7, group=group)
    ((gathered.sum() + reduced.sum()) * (rank + 1) + scattered.sum() + exchanged.prod()).backward()
    assert x.grad is not None
    return [*x.grad.tolist(), *gathered.tolist(), *scattered.tolist(), *exchanged.tolist()]


LAYERS = (
    fsdp1, zero_redundancy, join, model_averaging, pipeline, tensor_parallel, autograd_collectives,
)  # fmt: skip


def run_layer(name: str, backend: str) -> list[float]:
    return next(layer for layer in LAYERS if layer.__name__ == name)(dist.new_group(backend=backend))


@pytest.mark.parametrize("layer", [layer.__name__ for layer in LAYERS])
def test_results_equal_gloos(run: Callable[..., Any], layer: str) -> None:
    # Some of torch's modules take long to load.
    mine, gloo = (run(run_layer, layer, backend, timeout=180) for backend in ("zeropg", "gloo"))
    for ours, theirs in zip(mine, gloo, strict=True):
        assert len(ours) > 0 or layer == "pipeline"
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def check_overlapped_optimizer() -> None:
    """The optimizer steps inside backward, on its share of the parameters. gloo is refused there: it may hang."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, reference = DDP(make_model(), bucket_cap_mb=0.001), DDP(make_model())
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    for step in range(6):
        losses = [part(batch(step)).square().mean() for part in (model, reference)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        if step >= 2:  # until then it does not know DDP's buckets, and leaves the parameters alone
            expected.step()
        model.zero_grad()
        reference.zero_grad()
    assert len(optimizer._overlap_info.params_per_bucket) > 1
    assert not torch.equal(model.module[0].weight, make_model()[0].weight)  # type: ignore[union-attr]


def test_an_optimizer_that_steps_in_backward(run: Callable[..., Any]) -> None:
    run(check_overlapped_optimizer, timeout=180)


def check_compiled(compiler: str) -> None:
    import torch.distributed._functional_collectives as funcol

    rank, group = dist.get_rank(), dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(x * 2, "sum", group)
        gathered = funcol.all_gather_tensor(total + 1, 0, group)
        scattered = funcol.reduce_scatter_tensor(gathered, "avg", 0, group)
        swapped = funcol.all_to_all_single(scattered, [2, 2], [2, 2], group)
        coalesced = funcol.all_reduce_coalesced([swapped, scattered], "max", group)
        wholes = funcol.all_gather_into_tensor_coalesced([coalesced[0], coalesced[1] * 3], group)
        parts = funcol.reduce_scatter_tensor_coalesced(wholes, "sum", [0, 0], group)
        return parts[0] + parts[1] + funcol.broadcast(x, 1, group)

    x = torch.arange(4.0) + rank
    expected = step(x.clone())
    compiled = torch.compile(step, backend=compiler, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x.clone()), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_functional_collectives_compile(run: Callable[..., Any], compiler: str) -> None:
    run(check_compiled, compiler, timeout=180)


def check_compiled_ddp() -> None:
    model = DDP(make_model())
    reference = copy.deepcopy(model.module)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(batch(0)).square().mean()
    loss.backward()
    assert model.module[0].weight.grad is not None  # type: ignore[union-attr]
    reference(batch(0)).square().mean().backward()
    mean = reference[0].weight.grad
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(model.module[0].weight.grad, mean)  # type: ignore[union-attr]
    torch.compiler.reset()


def test_compiled_ddp(run: Callable[..., Any]) -> None:
    run(check_compiled_ddp, timeout=180)


def check_checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    import zeropg

    mesh = init_device_mesh("cpu", (2,))

    def state(fill: float) -> dict[str, Any]:
        return {
            "sharded": distribute_tensor(torch.arange(10.0) * fill, mesh, [Shard(0)]),
            "same": torch.full((3,), fill),
            "step": int(fill),
        }

    dcp.save(state(2.0), checkpoint_id=folder + "/plain")
    # Another thread checkpoints on the same group while this one goes on; torch takes a CPU group of its own for it.
    future = dcp.async_save(state(3.0), checkpoint_id=folder + "/async")
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    future.result()
    group = dist.new_group()
    dcp.async_save(state(4.0), checkpoint_id=folder + "/given", process_group=group).result()
    assert sum(counters["calls"] for counters in zeropg.stats(group).values()) >= 2, "it plans and finishes over it"
    for kind, fill in (("plain", 2.0), ("async", 3.0), ("given", 4.0)):
        loaded = state(0.0)
        dcp.load(loaded, checkpoint_id=f"{folder}/{kind}")
        assert loaded["sharded"].full_tensor().tolist() == [fill * i for i in range(10)]
        assert loaded["same"].tolist() == [fill] * 3 and loaded["step"] == int(fill)


def test_distributed_checkpoints(run: Callable[..., Any], tmp_path: Path) -> None:
    run(check_checkpoints, str(tmp_path), timeout=180)


def check_messages() -> None:
    rank = dist.get_rank()
    peer = 1 - rank
    received = [torch.empty(3), torch.empty(2)]
    operations = [
        dist.P2POp(dist.irecv, received[0], peer, tag=1),
        dist.P2POp(dist.isend, torch.full((2,), 10.0 + rank), peer, tag=2),
        dist.P2POp(dist.irecv, received[1], peer, tag=2),
        dist.P2POp(dist.isend, torch.full((3,), 20.0 + rank), peer, tag=1),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received[0].tolist() == [20.0 + peer] * 3 and received[1].tolist() == [10.0 + peer] * 2
    tensors = [torch.full((4,), float(rank)), torch.full((2, 2), 1.0)]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert tensors[0].tolist() == [1.0] * 4 and tensors[1].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_batched_messages_and_coalesced_collectives(run: Callable[..., Any]) -> None:
    run(check_messages)
