"""Parameters of unusual dtypes, sparse inputs, several devices: moved as they are, or refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, close, on_ranks, raises
from zeropg.sharding.arguments import check_parameters
from zeropg.sharding.units import UnitPlan

FROZEN = [
    torch.complex64,
    torch.complex128,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def values(dtype: torch.dtype) -> torch.Tensor:
    """[7] of all kinds of bytes that the dtype has."""
    codes = torch.arange(7 * dtype.itemsize, dtype=torch.uint8)
    return codes.bool()[:7] if dtype == torch.bool else codes.view(dtype)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        for index, dtype in enumerate(FROZEN):
            parameter = nn.Parameter(values(dtype).clone(), requires_grad=False)
            self.layers[index % 2].register_parameter(str(dtype).removeprefix("torch."), parameter)
        self.register_buffer("codes", values(torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check_frozen_dtypes() -> None:
    for stage in STAGES:
        model = zeropg.fully_shard(Mixed(), stage=stage)
        optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        with zeropg.full_parameters(model):
            found = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        saved = zeropg.full_state_dict(model, rank0_only=False)
        assert len(found) == len(FROZEN)
        for name, value in found.items():
            for one in (value, saved[name]):
                assert torch.equal(one.view(torch.uint8), values(value.dtype).view(torch.uint8)), (stage, name)
        assert torch.equal(saved["codes"].view(torch.uint8), values(torch.uint16).view(torch.uint8))
        zeropg.load_full_state_dict(model, saved, broadcast_from_rank0=True)


@on_ranks(2)
def test_frozen_parameters_of_every_dtype() -> None:
    check_frozen_dtypes()


@on_ranks(3, backend="gloo")
def test_frozen_parameters_of_every_dtype_over_gloo() -> None:
    check_frozen_dtypes()


class SparseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0, dtype=torch.float64).view(4, 3) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x, self.weight)


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SparseBlock()])
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.constant_(self.head.weight, 0.3)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x))


def sparse_input() -> torch.Tensor:
    dense = torch.tensor([[0, 1.5, 0, 2], [3, 0, 0, 0]], dtype=torch.float64)
    return dense.to_sparse().requires_grad_()


def check_sparse_input(stage: int) -> None:
    plain, model = SparseNet(), zeropg.fully_shard(SparseNet(), stage=stage)
    gradients = []
    for one in (plain, model):
        x = sparse_input()
        one(x).square().sum().backward()
        gradients.append(x.grad.to_dense())
    assert close(*gradients)
    with zeropg.full_gradients(model):
        for name, parameter in plain.named_parameters():
            assert close(model.get_parameter(name).grad, parameter.grad), name
    if stage == 3:
        with raises(RuntimeError, "is sharded"):
            model.blocks[0].weight.clone()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_sparse_input_that_needs_a_gradient(stage: int) -> None:
    check_sparse_input(stage)


@on_ranks(2, backend="gloo")
def test_a_sparse_input_where_units_are_gathered() -> None:
    check_sparse_input(3)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_batch_norm_computes_in_the_dtype_of_its_statistics(stage: int) -> None:
    x = torch.randn(4, 5).to(torch.bfloat16)
    norms = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model = zeropg.fully_shard(norms, stage=stage, units=[], param_dtype=torch.bfloat16)
    zeropg.full_state_dict(model)  # without a forward nothing is wrong
    with raises(ValueError, "BatchNorm1d '1'", "torch.bfloat16", "torch.float32", "buffer_dtype=torch.bfloat16"):
        model(x)
    model[1].running_mean = model[1].running_mean.to(torch.bfloat16)
    model[1].running_var = model[1].running_var.to(torch.bfloat16)
    model(x).sum().backward()
    assert model[1].running_mean.abs().sum() > 0
    instance = nn.InstanceNorm1d(5, affine=True, track_running_stats=True)  # which torch can mix
    zeropg.fully_shard(instance, stage=stage, units=[], param_dtype=torch.bfloat16)(x[None].mT).sum().backward()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_spectral_norm_computes_in_the_dtype_of_its_vectors(stage: int) -> None:
    kinds = {
        nn.utils.parametrizations.spectral_norm: ("_SpectralNorm '0.parametrizations.weight.0'", "_u"),
        nn.utils.spectral_norm: ("Linear '0'", "weight_u"),
    }
    for norm, (module, buffer) in kinds.items():
        for dtype in (None, torch.bfloat16):
            model = nn.Sequential(norm(nn.Linear(5, 5)), nn.Linear(5, 5))
            zeropg.fully_shard(model, stage=stage, param_dtype=torch.bfloat16, buffer_dtype=dtype)
            told = (f"{module} computes in torch.bfloat16 and keeps {buffer} in torch.float32", "buffer_dtype=")
            with nullcontext() if dtype else raises(ValueError, *told):
                model(torch.ones(4, 5)).sum().backward()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("rotation", torch.eye(5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.rotation


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_an_error_of_torchs_about_dtypes_names_the_buffers_that_kept_theirs(stage: int) -> None:
    def model(dtype: torch.dtype | None) -> nn.Module:
        modules = nn.Sequential(nn.Linear(5, 5), Rotated())
        return zeropg.fully_shard(modules, stage=stage, units=[Rotated], param_dtype=torch.bfloat16, buffer_dtype=dtype)

    with pytest.raises(RuntimeError, match="dtype") as raised:
        model(None)(torch.ones(4, 5))
    (note,) = raised.value.__notes__  # of the unit, and not once more of the root
    for words in ("param_dtype", "the buffers '1.rotation' are not", "buffer_dtype=torch.bfloat16 to fully_shard"):
        assert words in note, note
    with pytest.raises(RuntimeError) as raised:
        model(None)(torch.ones(4, 3))  # an error of another kind has no note
    assert not hasattr(raised.value, "__notes__")
    model(torch.bfloat16)(torch.ones(4, 5)).sum().backward()


@on_ranks(2, backend=("zeropg", "gloo"))
def test_a_sparse_buffer_is_rank_0s_on_every_rank() -> None:
    model = nn.Linear(3, 3)
    edges = torch.eye(3).mul(1.0 + dist.get_rank())
    model.register_buffer("edges", edges.to_sparse())
    model.register_buffer("rows", edges.to_sparse_csr())
    zeropg.fully_shard(model)
    for buffer in (model.edges, model.rows):
        assert torch.equal(buffer.to_dense(), torch.eye(3))
    model(model.edges @ torch.ones(3, 3)).sum().backward()


def test_parameters_on_several_devices_are_refused_by_name() -> None:
    plan = UnitPlan("", nn.Linear(2, 2))
    elsewhere: Any = SimpleNamespace(device=torch.device("cuda", 0), is_meta=False)
    plan.parameters = [(["here"], nn.Parameter(torch.ones(2))), (["there"], elsewhere)]
    with raises(ValueError, "'here' on cpu", "'there' on cuda:0", "one device"):
        check_parameters(plan.module, [plan])
