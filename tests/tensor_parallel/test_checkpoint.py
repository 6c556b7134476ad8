"""Checkpoints of models whose parameters are DTensors have whole tensors, and go to and from any number of ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeropg
from tests.sharding.ranks import equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import RankPool
from tests.tensor_parallel.model import (
    Run,
    difference,
    make_mesh,
    make_sharded,
    parallelize,
    step,
    whole_parameters,
)

BEFORE, AFTER = 2, 2  # steps
Pools = Callable[..., RankPool]


class Trainer:
    """A run over a mesh (dp, tp); or, without tp, over all ranks alone."""

    def __init__(self, dp: int, tp: int | None, stage: int, dtype: torch.dtype = torch.float64) -> None:
        torch.set_num_threads(1)
        self.mesh = make_mesh(dp, tp or 1)
        if tp is None:
            self.model: Any = zeropg.fully_shard(make_model(dtype, seed=7), stage=stage)
        else:
            self.model = make_sharded(self.mesh, dtype, stage=stage)
        self.optimizer = zeropg.shard_optimizer(make_optimizer(self.model), self.model)

    def train(self, first: int, last: int) -> Run:
        pairs = [step(self.model, self.optimizer, batch, self.mesh) for batch in make_batches()[first:last]]
        return [loss for loss, _ in pairs], whole_parameters(self.model), [norm for _, norm in pairs]


def save_and_go_on(directory: Path, kind: tuple[int, int | None, int], dtype: torch.dtype) -> Any:
    """The run after the save; and masters and optimizer state, whole, when it was made."""
    trainer = Trainer(*kind, dtype)
    trainer.train(0, BEFORE)
    extra = {"steps": BEFORE} if dist.get_rank() == 0 else None
    zeropg.save_checkpoint(
        directory, trainer.model, trainer.optimizer, extra=extra, rank_extra={"rank": dist.get_rank()}
    )
    masters = zeropg.full_state_dict(trainer.model)
    state = zeropg.full_optimizer_state_dict(trainer.optimizer)
    return trainer.train(BEFORE, BEFORE + AFTER), masters, state


def load_and_go_on(directory: Path, kinds: list[tuple[int, int | None, int]], dtype: torch.dtype) -> list[Any]:
    results = []
    for kind in kinds:
        trainer = Trainer(*kind, dtype)
        trainer.train(5, 6)
        extra = zeropg.load_checkpoint(directory, trainer.model, trainer.optimizer)
        loaded = zeropg.full_state_dict(trainer.model), zeropg.full_optimizer_state_dict(trainer.optimizer)
        results.append((trainer.train(BEFORE, BEFORE + AFTER), extra, loaded))
    return results


FOUR: list[tuple[int, int | None, int]] = [(2, 2, 0), (2, 2, 3), (1, 4, 2), (4, 1, 1), (4, None, 2)]
FEWER: dict[int, list[tuple[int, int | None, int]]] = {1: [(1, None, 3), (1, 1, 1)], 2: [(1, 2, 3), (2, 1, 0)]}


@pytest.mark.parametrize(
    "kind",
    [pytest.param((2, 2, 2), marks=pytest.mark.soak), (4, None, 3), pytest.param((1, 4, 3), marks=pytest.mark.soak)],
    ids=str,
)
def test_training_goes_on_with_any_mesh_and_stage(
    rank_pool: Pools, tmp_path: Path, kind: tuple[int, int | None, int]
) -> None:
    pool = rank_pool(4)
    saved = pool.run(save_and_go_on, tmp_path / "saved", kind, torch.float64, timeout=120)
    expected, masters, state = saved[0]
    check_files(tmp_path / "saved", masters, state, kind)
    runs = {4: (FOUR, pool.run(load_and_go_on, tmp_path / "saved", FOUR, torch.float64, timeout=240))}
    for ranks, kinds in FEWER.items():
        runs[ranks] = kinds, rank_pool(ranks).run(load_and_go_on, tmp_path / "saved", kinds, torch.float64, timeout=120)
    for kinds, results in runs.values():
        for rank, of_rank in enumerate(results):
            for how, (run, (extra, rank_extra), (parameters, optimizer)) in zip(kinds, of_rank, strict=True):
                assert extra == {"steps": BEFORE}
                assert rank_extra == {"rank": rank}
                assert difference(run, expected) < 1e-12, how
                if rank == 0:
                    assert same(parameters, masters), how
                    assert optimizer["state"].keys() == state["state"].keys()
                    assert all(same(entries, state["state"][name]) for name, entries in optimizer["state"].items())


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name] for name, value in a.items()
    )


def check_files(directory: Path, masters: dict[str, Any], state: dict[str, Any], kind: Any) -> None:
    """The files have the whole tensors under the names of the plain model; the manifest says how they were placed."""
    (data,) = directory.glob("data-*")
    tensors = load_file(next(data.glob("model*.safetensors")))
    plain = make_model(torch.float64).state_dict()
    assert tensors.keys() | {"head.weight"} == plain.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == plain[name].shape
        assert equal(tensor, masters[name])
    optimizer = load_file(next(data.glob("optimizer*.safetensors")))
    for name, entries in state["state"].items():
        assert equal(optimizer[f"{name}/exp_avg"], entries["exp_avg"])
        assert equal(optimizer[f"{name}/exp_avg_sq"], entries["exp_avg_sq"])
    manifest = json.loads((directory / "zeropg_checkpoint.json").read_text())["manifest"]
    placements = manifest["origin"]["placements"].get("of the parts of")
    if kind[1] is None:
        assert placements is None
    else:
        assert placements["blocks.0.up.weight"] == f"shard(0) over tp {kind[1]}"
        assert placements["blocks.0.down.weight"] == f"shard(1) over tp {kind[1]}"
        assert placements["norm.weight"] == f"replicate over tp {kind[1]}"


def save_with_replicas(directory: Path) -> tuple[dict[str, Any], Any]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = parallelize(make_model(torch.float64), mesh["tp"])
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    zeropg.fully_shard(model, mesh=mesh["replicate", "shard"], stage=2)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    loss_of(model, make_batches()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    zeropg.save_checkpoint(directory / "all", model, optimizer)
    zeropg.save_checkpoint(directory / "trained", model, optimizer, exclude_frozen=True)
    before = zeropg.full_state_dict(model, rank0_only=False), zeropg.full_optimizer_state_dict(optimizer)
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    optimizer.step()
    zeropg.load_checkpoint(directory / "all", model, optimizer)
    assert same(zeropg.full_state_dict(model, rank0_only=False), before[0])
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
        model.blocks[0].down.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"blocks\.0\.up\.weight") if dist.get_rank() == 0 else nullcontext():
        zeropg.load_checkpoint(directory / "trained", model, optimizer)
    after = zeropg.full_state_dict(model, rank0_only=False)
    assert equal(after.pop("blocks.0.up.weight"), 2 * before[0]["blocks.0.up.weight"])
    assert all(equal(value, before[0][name]) for name, value in after.items())
    return before


def load_whole(directory: Path, kind: tuple[int, int | None, int]) -> tuple[dict[str, Any], Any]:
    trainer = Trainer(*kind)
    for block in trainer.model.blocks:
        block.up.weight.requires_grad_(False)
    zeropg.load_checkpoint(directory, trainer.model, trainer.optimizer)
    return zeropg.full_state_dict(trainer.model), zeropg.full_optimizer_state_dict(trainer.optimizer)


def test_replicas_and_frozen_parameters(rank_pool: Pools, tmp_path: Path) -> None:
    masters, state = rank_pool(4).run(save_with_replicas, tmp_path, timeout=120)[0]
    for ranks, kind in ((1, (1, None, 3)), (2, (1, 2, 1))):
        model, optimizer = rank_pool(ranks).run(load_whole, tmp_path / "all", kind, timeout=120)[0]
        assert same(model, masters)
        assert all(same(entries, state["state"][name]) for name, entries in optimizer["state"].items())


def load_damaged(directory: Path) -> str:
    trainer = Trainer(2, 2, 3)
    before = whole_parameters(trainer.model)
    try:
        zeropg.load_checkpoint(directory, trainer.model, trainer.optimizer)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"loaded, and has {len(before)} parameters")


def test_damage_in_one_part_is_an_error_on_all_ranks(rank_pool: Pools, tmp_path: Path) -> None:
    pool = rank_pool(4)
    pool.run(save_and_go_on, tmp_path / "saved", (2, 2, 2), torch.float64, timeout=120)
    for name in ("model", "optimizer"):
        shutil.copytree(tmp_path / "saved", tmp_path / name)
        (file,) = (tmp_path / name).glob(f"data-*/{name}.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        errors = pool.run(load_damaged, tmp_path / name)
        assert all("holds old and new values now" in error and "is damaged" in error for error in errors), errors


@on_ranks(4)
def test_debts_of_parts_are_refused_by_name() -> None:
    mesh = make_mesh(2, 2)
    words = "'embedding.weight' is a DTensor (shard(0) over tp 2)", "the model is tensor-parallel", "compression"
    model = make_sharded(mesh, torch.float32, stage=1)
    for parameter in model.parameters():
        parameter.requires_grad_(not isinstance(parameter, DTensor))
    plain = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = zeropg.shard_optimizer(zeropg.optim.OneBitAdam(plain, warmup_steps=1), model)
    compressed = make_sharded(mesh, torch.float32, stage=1, compression=zeropg.compression.TopK(0.1))
    for own, stepped in ((model, optimizer), (compressed, None)):
        for batch in make_batches()[:3]:
            loss_of(own, batch).backward()
            if stepped is not None:
                stepped.step()
            own.zero_grad()
        with raises(NotImplementedError, *words):
            zeropg.save_checkpoint("/nowhere", own, stepped)
