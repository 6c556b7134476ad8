"""Whole tensors of models whose parameters are DTensors, out and in: state dicts, averages, weights in 16 bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

import zeropg
from tests.sharding.ranks import close, equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.tensor_parallel.model import make_mesh, make_sharded, parallelize, step, whole_parameters


def trained(stage: int, dtype: torch.dtype = torch.float32, dp: int = 2, tp: int = 2, **options: Any) -> Any:
    mesh = make_mesh(dp, tp)
    model = make_sharded(mesh, dtype, stage=stage, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    for batch in make_batches()[:2]:
        step(model, optimizer, batch, mesh)
    return model, optimizer


@on_ranks(4)
def test_a_full_state_dict_has_whole_plain_tensors() -> None:
    for stage in (1, 3):
        model, optimizer = trained(stage)
        state = zeropg.full_state_dict(model)
        assert bool(state) == (dist.get_rank() == 0)
        everywhere = zeropg.full_state_dict(model, rank0_only=False)
        plain = make_model()
        plain.load_state_dict(everywhere)
        shown = whole_parameters(model)
        assert all(type(value) is torch.Tensor for value in everywhere.values())
        assert all(equal(value, shown[name]) for name, value in plain.named_parameters())
        assert everywhere["head.weight"] is everywhere["embedding.weight"]
        some = zeropg.full_state_dict(model, only=["blocks.1.down.weight"], rank0_only=False, dtype=torch.bfloat16)
        assert some.keys() == {"blocks.1.down.weight"}
        assert equal(some["blocks.1.down.weight"], shown["blocks.1.down.weight"].bfloat16())
        whole = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)
        for name, parameter in plain.named_parameters():
            assert whole["state"][name]["exp_avg"].shape == parameter.shape
        assert whole["param_groups"][0]["params"][0] == "embedding.weight"


@pytest.mark.parametrize("how", ["load_state_dict", "load_full_state_dict", "broadcast"])
@on_ranks(4)
def test_whole_plain_tensors_load(how: str) -> None:
    for stage in (0, 2, 3):
        model, _ = trained(stage)
        values = {name: value.double() for name, value in make_model(seed=3).state_dict().items()}
        if how == "load_state_dict":
            missing, unexpected = model.load_state_dict(values)
        elif how == "load_full_state_dict":
            missing, unexpected = zeropg.load_full_state_dict(model, values)
        else:
            own = values if dist.get_rank() == 0 else {}
            missing, unexpected = zeropg.load_full_state_dict(model, own, broadcast_from_rank0=True)
        assert not missing
        assert not unexpected
        shown = whole_parameters(model)
        assert all(equal(shown[name], values[name].float()) for name in shown)


@on_ranks(4)
def test_masters_take_what_is_loaded_in_its_own_precision() -> None:
    model, _ = trained(2, param_dtype=torch.bfloat16)
    values = make_model(seed=3).state_dict()
    model.load_state_dict(values)
    masters = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(masters[name], value) for name, value in values.items())


@on_ranks(4)
def test_a_state_dict_of_dtensors_loads_into_the_same_mesh() -> None:
    mesh = make_mesh(2, 2)
    model = make_sharded(mesh, torch.float32, stage=1)
    other = make_sharded(mesh, torch.float32, stage=1)
    with torch.no_grad(), zeropg.full_parameters(other, writable=True):
        for parameter in other.parameters():
            parameter.mul_(2)
    other.zero_grad()
    values = {name: value.detach().clone() for name, value in other.state_dict().items()}
    model.load_state_dict(values)
    theirs, ours = whole_parameters(other), whole_parameters(model)
    assert all(equal(theirs[name], ours[name]) for name in theirs)


@on_ranks(4)
def test_what_does_not_fit_is_an_error_on_all_ranks() -> None:
    model, _ = trained(2)
    values = dict(make_model().state_dict())
    before = whole_parameters(model)
    wrong = values | {"blocks.0.up.weight": values["blocks.0.up.weight"][:-1]}
    for broadcast in (False, True):
        with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up\.weight"):
            zeropg.load_full_state_dict(model, wrong, broadcast_from_rank0=broadcast)
    # On the ranks of one part of the tensors alone.
    missing = {k: v for k, v in values.items() if k != "norm.bias"} if dist.get_rank() % 2 else values
    with pytest.raises(RuntimeError, match="Missing key"):
        zeropg.load_full_state_dict(model, missing)
    model.load_state_dict(before, strict=False)


def export(directory: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    for name, (stage, dp, tp) in {"a": (3, 2, 2), "b": (1, 1, 4), "several files": (2, 2, 2)}.items():
        model, _ = trained(stage, dp=dp, tp=tp)
        size = 20_000 if name == "several files" else "5GB"
        zeropg.save_16bit_weights(model, directory / name, max_shard_size=size)
        if name == "a":
            expected = zeropg.full_state_dict(model, dtype=torch.bfloat16)
    return expected


def test_weights_in_16_bits_are_whole(rank_pool: Any, tmp_path: Path) -> None:
    expected = rank_pool(4).run(export, tmp_path, timeout=120)[0]
    del expected["head.weight"]  # tied
    for name in ("a", "b", "several files"):
        files = sorted((tmp_path / name).glob("*.safetensors"))
        tensors = {key: value for file in files for key, value in load_file(file).items()}
        assert tensors.keys() == expected.keys()
        for key, value in tensors.items():
            assert value.dtype == torch.bfloat16
            if name == "b":  # other ranks sum in another order
                torch.testing.assert_close(value, expected[key], rtol=0.02, atol=1e-3)
            else:
                assert equal(value, expected[key]), key


@on_ranks(4)
def test_the_state_of_a_plain_optimizer_loads() -> None:
    """Before and after `shard_optimizer`; embedding and head are 61 rows on two ranks."""
    mesh, (first, second, *_) = make_mesh(2, 2), make_batches()
    plain = make_model(torch.float64)
    its_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)

    def step_plain(batch: torch.Tensor) -> None:
        loss_of(plain, batch).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()

    step_plain(first)
    weights, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(its_optimizer.state_dict())
    step_plain(second)
    expected = dict(plain.named_parameters())
    for stage, is_loaded_before in ((0, False), (3, False), (1, True), (3, True)):
        model = parallelize(make_model(torch.float64), mesh["tp"])
        torch_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if is_loaded_before:
            torch_optimizer.load_state_dict(copy.deepcopy(state))
        zeropg.fully_shard(model, mesh=mesh["dp"], stage=stage)
        optimizer = zeropg.shard_optimizer(torch_optimizer, model)
        if not is_loaded_before:
            optimizer.load_state_dict(copy.deepcopy(state))
        model.load_state_dict(weights)
        loss_of(model, second.chunk(2)[mesh["dp"].get_local_rank()]).backward()
        optimizer.step()
        for name, value in whole_parameters(model).items():
            assert close(value, expected[name].detach(), 1e-11), (stage, is_loaded_before, name)


@on_ranks(4)
def test_values_over_another_mesh_are_refused_by_name() -> None:
    mesh = make_mesh(2, 2)
    model = make_sharded(mesh, stage=1)
    state = model.state_dict()
    name = "blocks.0.up.weight"
    state[name] = distribute_tensor(torch.zeros(model.blocks[0].up.weight.shape).double(), mesh, [Shard(0), Shard(0)])
    with raises(ValueError, f"{name!r} is a DTensor over another mesh", "full_tensor()"):
        model.load_state_dict(state)
