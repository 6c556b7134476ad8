"""Checkpoints of models whose parameters are DTensors have whole tensors, and go to and from any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.sharding.ranks import equal
from tests.small_gpt import make_batches, make_model, make_optimizer
from tests.spawn import RankPool
from tests.tensor_parallel.model import Run, difference, make_mesh, make_sharded, step, whole_parameters

BEFORE, AFTER = 2, 2  # steps
Pools = Callable[..., RankPool]


class Trainer:
    """A run over a mesh (dp, tp); or, without tp, over all ranks alone."""

    def __init__(self, dp: int, tp: int | None, stage: int, dtype: torch.dtype = torch.float64) -> None:
        import zeropg

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
    import zeropg

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
    import zeropg

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


@pytest.mark.parametrize("kind", [(2, 2, 2), (1, 4, 3), (4, None, 3)])
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
