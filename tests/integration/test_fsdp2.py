"""FSDP2, its checkpoints, DTensor and tensor parallelism over zeropg give gloo's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integration.gpt_losses import check_losses_are_gloos
from tests.spawn import RankPool


@pytest.fixture(scope="module", params=[2, 4])
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(request.param).run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.LayerNorm(32)
        self.up = nn.Linear(32, 65)
        self.down = nn.Linear(65, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.normal(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), *(Block() for _ in range(3)), nn.Linear(32, 3))


def mesh_of(backend: str, hybrid: bool) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    size = dist.get_world_size()
    if hybrid:
        pairs = torch.arange(size).view(2, size // 2)
        groups = []
        for ranks in (pairs.t().tolist(), pairs.tolist()):
            made = [dist.new_group(members, backend=backend) for members in ranks]
            groups.append(next(g for g, members in zip(made, ranks, strict=True) if dist.get_rank() in members))
        return DeviceMesh.from_group(groups, "cpu", pairs, mesh_dim_names=("replicate", "shard"))
    return DeviceMesh.from_group(dist.new_group(backend=backend), "cpu", mesh_dim_names=("shard",))


def losses(backend: str, hybrid: bool, mixed: bool) -> list[float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(backend, hybrid)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32)
    model = make_model()
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    result = []
    for _ in range(8):
        x = torch.randn(16, 10, generator=generator)
        loss = (model(x).float() - x[:, :3]).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result += [loss.item(), norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()]
    return result


def check_losses(hybrid: bool, mixed: bool) -> None:
    ours, gloos = losses("zeropg", hybrid, mixed), losses("gloo", hybrid, mixed)
    assert ours == pytest.approx(gloos, rel=1e-5), (ours, gloos)
    assert ours[-2] < 0.7 * ours[0], ours


@pytest.mark.parametrize(("hybrid", "mixed"), [(False, False), (False, True), (True, False)])
def test_fsdp2_has_gloos_losses(run: Callable[..., Any], hybrid: bool, mixed: bool) -> None:
    run(check_losses, hybrid, mixed)


def check_divide_factor(factor: float) -> None:
    """Factors that are no average: FSDP2 then sums with PREMUL_SUM."""
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = make_model(), make_model()
    mesh = mesh_of("zeropg", False)
    modules = [*model[1:-1], model]
    for module in modules:
        fully_shard(module, mesh=mesh).set_gradient_divide_factor(factor)
    x = [torch.randn(16, 10, generator=torch.Generator().manual_seed(peer)) for peer in range(size)]
    model(x[rank]).square().mean().backward()
    (sum(reference(part).square().mean() for part in x) / factor).backward()  # type: ignore[union-attr]
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6)


def test_fsdp2_divides_gradients_by_any_factor(run: Callable[..., Any]) -> None:
    run(check_divide_factor, 2.5)


def with_fsdp2(model: nn.Module, backend: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(backend, False)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_fsdp2_trains_the_gpt_with_gloos_losses(run: Callable[..., Any]) -> None:
    run(check_losses_are_gloos, with_fsdp2)


def check_state_dict() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=mesh_of("zeropg", False))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert full.keys() == whole.keys() and all(torch.equal(full[name], whole[name]) for name in whole)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, zeros, options=options)
    assert not any(parameter.full_tensor().any() for parameter in model.parameters())


def test_full_state_dicts_are_gathered_and_broadcast(run: Callable[..., Any]) -> None:
    run(check_state_dict)


def check_tensor_parallel() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of("zeropg", False)
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(6, 8)
    expected = model(x)
    parallel = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert torch.allclose(parallel(x), expected, atol=1e-6)
    whole = torch.arange(4.0 * size * size).view(2 * size, 2 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)


def test_tensor_parallelism_and_redistribution(run: Callable[..., Any]) -> None:
    run(check_tensor_parallel)
