"""Checkpoints of tensors that are cut in every way: along two dimensions, into no elements, into wide columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zeropg
from tests.sharding.ranks import close, equal, on_ranks, raises
from tests.tensor_parallel.model import make_mesh, make_sharded, whole_parameters
from zeropg.rank_io.parallel_files import ParallelFiles

ROW, COLUMN = (Shard(0), Replicate()), (Replicate(), Shard(1))
SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "both": ((6, 5), (Shard(0), Shard(1))),
    "twice": ((7, 3), (Shard(0), Shard(0))),
    "column": ((6, 5), COLUMN),
    "experts": ((3, 4, 5), (Shard(0), Shard(2))),
    "middle": ((2, 3, 2, 2), (Shard(1), Shard(3))),
    "replicated": ((4,), (Replicate(), Replicate())),
    "empty part": ((1, 3), (Shard(0), Shard(1))),
    "one mesh alone": ((5, 2), (Shard(0),)),
    "one mesh alone, columns": ((3, 4), (Shard(1),)),
    # Of a chunk's size, and further apart: each row is read and written by itself.
    "wide": ((3, 600_000), COLUMN),
    "long": ((3_000, 2), COLUMN),
    "plain": ((5, 3), None),
    "frozen": ((4, 6), (Shard(1), Shard(0))),
    "none": ((0, 4), ROW),
}


class Odd(nn.Module):
    def __init__(self, mesh: Any, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.cubes: list[Any] = []
        for name, (shape, placements) in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            if placements is not None and mesh is not None:
                own = mesh["row", "column"] if len(placements) == 2 else mesh["column"]
                value = distribute_tensor(value, own, placements)
            setattr(self, name, nn.Parameter(value, requires_grad=name != "frozen"))
        self.register_buffer("count", torch.randn(3, generator=generator))

    def forward(self) -> torch.Tensor:
        wholes = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters() if p.requires_grad)
        total: torch.Tensor = sum((p.double() ** 3).sum() for p in wholes)  # type: ignore[assignment]
        return total


def make(sizes: tuple[int, int, int] | None, stage: int, seed: int = 0) -> tuple[Any, Any]:
    """sizes: of the mesh (dp, row, column); None: without tensor parallelism."""
    torch.set_num_threads(1)
    if sizes is None:
        model = zeropg.fully_shard(Odd(None, seed), stage=stage)
    else:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "row", "column"))
        model = zeropg.fully_shard(Odd(mesh, seed), mesh=mesh["dp"], stage=stage)
    return model, zeropg.shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)


def truth(seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """After a step: values, and what the optimizer has of each parameter."""
    model = Odd(None, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model().backward()
    optimizer.step()
    values = {name: value.detach() for name, value in model.state_dict().items()}
    states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return values, {name: entries for name, entries in states.items() if name != "none"}  # without elements, no state


def stepped(sizes: tuple[int, int, int] | None, stage: int) -> tuple[Any, Any]:
    model, optimizer = make(sizes, stage)
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


MESHES: list[tuple[tuple[int, int, int] | None, int]] = [((1, 2, 2), 2), ((2, 1, 2), 3), ((2, 2, 1), 1), (None, 2)]


def save_in_all_ways(directory: Path, sizes: tuple[int, int, int] | None, stage: int) -> None:
    model, optimizer = stepped(sizes, stage)
    zeropg.save_checkpoint(directory / "checkpoint", model, optimizer)
    dcp.save(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=directory / "dcp")
    pending = zeropg.save_checkpoint(directory / "async", model, optimizer, async_save=True)
    zeropg.save_16bit_weights(model, directory / "export")
    model().backward()
    optimizer.step()
    assert pending is not None
    pending.wait()
    # Ranks without the file system.
    blind = dist.get_rank() in (1, 3)
    with mock.patch.object(ParallelFiles, "open", (lambda self: False) if blind else ParallelFiles.open):
        zeropg.save_checkpoint(directory / "streamed", *stepped(sizes, stage))


def load_all(directory: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    results = []
    for kind in ("checkpoint", "dcp"):
        for sizes, stage in MESHES if kind == "checkpoint" else MESHES[:2]:
            model, optimizer = make(sizes, (stage + 1) % 4, seed=5)
            where = directory / kind
            if kind == "dcp":
                dcp.load(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=where)
            else:
                zeropg.load_checkpoint(where, model, optimizer)
            whole = zeropg.full_state_dict(model), zeropg.full_optimizer_state_dict(optimizer)
            results.append(whole)
    return results


@pytest.mark.parametrize("mesh", [0, *(pytest.param(index, marks=pytest.mark.soak) for index in (1, 2, 3))])
def test_every_cut_goes_to_every_other_one(rank_pool: Any, tmp_path: Path, mesh: int) -> None:
    pool, (values, states) = rank_pool(4), truth()
    pool.run(save_in_all_ways, tmp_path, *MESHES[mesh], timeout=240)
    (data,) = (tmp_path / "checkpoint").glob("data-*")
    for other in ("async", "streamed"):
        (theirs,) = (tmp_path / other).glob("data-*")
        for file in data.glob("[mo]*.safetensors"):
            assert file.read_bytes() == (theirs / file.name).read_bytes(), (other, file.name)
    tensors = load_file(data / "model.safetensors")
    assert tensors.keys() == values.keys()
    assert all(close(value, values[name], 1e-6) for name, value in tensors.items())
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(equal(exported[name], value.bfloat16()) for name, value in tensors.items())
    for model, optimizer in pool.run(load_all, tmp_path, timeout=240)[0]:
        assert model.keys() == tensors.keys()
        assert all(equal(value, tensors[name]) for name, value in model.items())
        assert optimizer["state"].keys() == states.keys()
        for name, entries in states.items():
            for key, value in entries.items():
                assert close(optimizer["state"][name][key], value, 1e-5), (name, key)


def load_and_look(directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    for sizes, stage in MESHES[:3]:
        model, _ = make(sizes, stage, seed=5)
        names = zeropg.load_pretrained(model, directory)
        assert names == ([], [])
        whole = zeropg.full_state_dict(model, rank0_only=False)
        assert whole.keys() == expected.keys()
        assert all(equal(value, expected[name].float()) for name, value in whole.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_hugging_face_load(rank_pool: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({name: value.to(dtype) for name, value in truth()[0].items()}, tmp_path / "model.safetensors")
    rank_pool(4).run(load_and_look, tmp_path, timeout=120)


@on_ranks(4)
def test_an_average_is_of_the_whole_weights() -> None:
    for sizes, stage in MESHES[:2]:
        model, optimizer = make(sizes, stage)
        average = zeropg.ema(model, 0.5)
        first = whole_parameters(model)
        average.update()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        second = whole_parameters(model)
        with average.average_parameters():
            shown = whole_parameters(model)
            assert all(close(shown[name], (first[name] + second[name]) / 2, 1e-6) for name in shown)
        assert all(equal(value, second[name]) for name, value in whole_parameters(model).items())
        state = average.state_dict(rank0_only=False)
        assert all(equal(value, shown[name]) for name, value in state["parameters"].items())
        other = zeropg.ema(make(*MESHES[3])[0], 0.5)
        other.load_state_dict(state)
        assert all(equal(v, shown[n]) for n, v in other.state_dict(rank0_only=False)["parameters"].items())
        average.load_state_dict(other.state_dict(rank0_only=False))
        assert all(equal(v, shown[n]) for n, v in average.state_dict(rank0_only=False)["parameters"].items())


@on_ranks(4)
def test_a_distributed_tensor_that_nothing_shards_is_refused() -> None:
    mesh = make_mesh(2, 2)
    model = make_sharded(mesh)
    model.register_buffer("table", distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
    for save in (zeropg.save_checkpoint, zeropg.load_checkpoint):
        with raises(NotImplementedError, "'table' is a DTensor that fully_shard was not given"):
            save("/nowhere", model)
    with raises(NotImplementedError, "'table' is a DTensor (shard(0) over tp 2)", "export it apart"):
        zeropg.save_16bit_weights(model, "/nowhere")
    with raises(NotImplementedError, "'table' is a DTensor that fully_shard was not given"):
        dcp.save(zeropg.dcp_state_dict(model), checkpoint_id="/nowhere")
