"""One small real model per kind of parallelism in torch, over zeropg on four ranks: the losses of one plain process.

What two ranks show (DDP, Join, FSDP1, ZeroRedundancyOptimizer, ...) is in test_ddp.py and test_torch_layers.py.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.spawn import RankPool

RANKS = 4
STEPS = 4


@pytest.fixture(scope="module", params=["zeropg", "gloo"], ids="world_of_{}".format)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """With a gloo world the mesh's dimensions are moved to zeropg one by one, by backend_override."""
    with RankPool(RANKS, backend=request.param) as pool:
        yield pool.run


@pytest.fixture(scope="module")
def run_on_zeropg(rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(RANKS).run


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.normal = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.normal(x))))


def make_model(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def whole_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, part: int = 0, parts: int = 1, steps: int = STEPS) -> list[float]:
    """The losses of this part of the data; gradients are averaged by the model's wrapper."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(steps):
        x = whole_batch(step).chunk(parts)[part]
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_mean(losses: list[float], group: Any = None) -> None:
    """The mean over the parts of the data is the whole's loss, as in one plain process."""
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean, group=group)
    expected = torch.tensor(train(make_model()), dtype=torch.float64)
    torch.testing.assert_close(mean / dist.get_world_size(group), expected, rtol=1e-5, atol=1e-6)
    assert expected[-1] < 0.9 * expected[0]


def mesh_2d(*names: str) -> DeviceMesh:
    import zeropg  # noqa: F401

    override: dict[int | str, Any] = {name: "zeropg" for name in names}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
    for name in names:
        assert mesh.get_group(name)._get_backend(torch.device("cpu")).name() == "zeropg"
    return mesh


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded_and_tensor_parallel() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_2d("dp", "tp")
    model = make_model()
    tensor_parallel(model, mesh["tp"])
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    check_mean(train(model, mesh.get_local_rank("dp"), 2), mesh.get_group("dp"))


def hybrid_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_2d("replicate", "shard")
    model = make_model()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_mean(train(model, dist.get_rank(), RANKS))


def hybrid_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        make_model(),
        device_mesh=mesh_2d("replicate", "shard"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    check_mean(train(model, dist.get_rank(), RANKS))


def ddp_of_tensor_parallel() -> None:
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = mesh_2d("dp", "tp")
    model = make_model()
    tensor_parallel(model, mesh["tp"])
    assert model[0].up.weight.to_local().shape == (32, 16)
    _pre_dp_module_transform(model)  # DDP reduces the local tensors
    replicated = DDP(model, process_group=mesh.get_group("dp"))
    check_mean(train(replicated, mesh.get_local_rank("dp"), 2), mesh.get_group("dp"))


MESHES = (sharded_and_tensor_parallel, hybrid_fsdp2, hybrid_fsdp1, ddp_of_tensor_parallel)


@pytest.mark.parametrize("layout", MESHES, ids=lambda layout: layout.__name__)
def test_two_dimensional_meshes(run: Callable[..., Any], layout: Callable[[], None]) -> None:
    run(layout, timeout=180)


def sequence_parallel() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    model = make_model()
    for block in model:
        plan = {
            "normal": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        shard = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False)
        parallelize_module(block, mesh, shard)
    reference, optimizers = make_model(), []
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, reference)]
    for step in range(STEPS):
        x = whole_batch(step)
        outputs = [model(x).full_tensor(), reference(x)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            (output - x.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_sequence_parallelism(run_on_zeropg: Callable[..., Any]) -> None:
    run_on_zeropg(sequence_parallel, timeout=180)


def pipeline(kind: str) -> None:
    from torch.distributed import pipelining

    rank = dist.get_rank()
    several = kind in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS")
    stages = 2 * RANKS if several else RANKS
    model = make_model(stages)
    reference = copy.deepcopy(model)
    mine = [
        pipelining.PipelineStage(model[number], number, stages, torch.device("cpu"))
        for number in range(rank, stages, RANKS)
    ]
    schedule = getattr(pipelining, kind)(mine if several else mine[0], n_microbatches=4, loss_fn=nn.MSELoss())
    x = whole_batch(0)
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if rank == 0 else []), **({"target": x.flip(1), "losses": losses} if rank == RANKS - 1 else {}))
    expected = (reference(x) - x.flip(1)).square().mean()
    expected.backward()
    if rank == RANKS - 1:
        assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), rel=1e-5)
    for number in range(rank, stages, RANKS):
        for got, want in zip(model[number].parameters(), reference[number].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelines(run_on_zeropg: Callable[..., Any], kind: str) -> None:
    run_on_zeropg(pipeline, kind, timeout=180)


class RingAttention(torch.autograd.Function):
    """What torch's context_parallel runs, with the CPU's attention: torch itself offers only the GPU's to it."""

    @staticmethod
    def forward(context: Any, *qkv: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp, *_ = _attention._templated_ring_attention(dist.group.WORLD, 2, forward, *qkv, is_causal=True)
        context.save_for_backward(*qkv, out, logsumexp)
        return out

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        from torch.distributed.tensor.experimental._context_parallel import _attention

        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        arguments = (gradient.contiguous(), "grad_out", *context.saved_tensors)
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, backward, *arguments, is_causal=True, dropout_p=0.0
        )[:3]


def context_parallel(rotation: str) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention.set_rotate_method(rotation)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, 2, 8 * RANKS, 8, generator=generator, requires_grad=True) for _ in range(3)]
    expected = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        """Of 2 * ranks chunks of the sequence one from the front and one from the back: as much work for all."""
        chunks = tensor.detach().chunk(2 * RANKS, dim=2)
        return torch.cat([chunks[rank], chunks[2 * RANKS - 1 - rank]], dim=2)

    parts = [own(tensor).requires_grad_() for tensor in whole]
    output = RingAttention.apply(*parts)
    output.square().sum().backward()
    torch.testing.assert_close(output, own(expected), rtol=1e-4, atol=1e-5)
    for part, tensor in zip(parts, whole, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(part.grad, own(tensor.grad), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_context_parallelism(run_on_zeropg: Callable[..., Any], rotation: str) -> None:
    run_on_zeropg(context_parallel, rotation, timeout=180)


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    everybody = [{"rank": peer, "text": "x" * 1000 * peer} for peer in range(size)]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    assert gathered == everybody
    at_two: list[Any] | None = [None] * size if rank == 2 else None
    dist.gather_object(mine, at_two, dst=2)
    assert at_two == (everybody if rank == 2 else None)
    received: list[Any] = [None]
    dist.scatter_object_list(received, everybody if rank == 1 else None, src=1)
    assert received == [mine]
    shared = everybody if rank == 3 else [None] * size
    dist.broadcast_object_list(shared, src=3)
    assert shared == everybody
    if rank == 0:
        dist.send_object_list([mine, "hello"], 1)
    elif rank == 1:
        message: list[Any] = [None, None]
        dist.recv_object_list(message, 0)
        assert message == [everybody[0], "hello"]


def test_object_collectives(run_on_zeropg: Callable[..., Any]) -> None:
    run_on_zeropg(objects)


def compile_with_inductor(folder: str) -> None:
    import os

    import torch.distributed._functional_collectives as funcol

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    group, rank = dist.group.WORLD, dist.get_rank()

    def step(x: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(torch.relu(x) * 2, "sum", group)
        gathered = funcol.all_gather_tensor(total + 1, 0, group)
        return funcol.reduce_scatter_tensor(gathered.sin(), "avg", 0, group) + x

    x = torch.linspace(-1, 1, 8) + rank
    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), step(x))
    torch.compiler.reset()


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_functional_collectives_through_inductor(tmp_path: Any) -> None:
    with RankPool(2) as pool:
        pool.run(compile_with_inductor, str(tmp_path), timeout=240)


def compressed_and_joined() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.algorithms.join import Join

    rank = dist.get_rank()
    model = DDP(make_model())
    model.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(1 + rank):  # uneven inputs
            x = whole_batch(step).chunk(RANKS)[rank]
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybody = torch.empty(RANKS, weights.numel())
    dist.all_gather_into_tensor(everybody, weights)
    assert all(torch.equal(weights, other) for other in everybody)


def test_ddp_with_a_hook_and_uneven_inputs(run_on_zeropg: Callable[..., Any]) -> None:
    run_on_zeropg(compressed_and_joined)
