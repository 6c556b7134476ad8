"""Checkpoints of several optimizers, of the same or of different classes, at any world size and stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import BACKENDS, STAGES, close, equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:.*no param group holds")


class Run:
    """A model whose blocks have an optimizer of their own; `seed` and `factor` other than 0 and 1 are to be undone."""

    def __init__(
        self,
        stage: int,
        *,
        kinds: str = "different",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        factor: int = 1,
    ) -> None:
        torch.set_num_threads(1)
        self.model = zeropg.fully_shard(make_model(dtype, seed=seed), stage=stage)
        blocks = set(self.model.blocks.parameters())
        rest = [p for p in self.model.parameters() if p not in blocks]
        first = torch.optim.AdamW([p for p in self.model.parameters() if p in blocks], lr=factor * 1e-2)
        second: torch.optim.Optimizer = torch.optim.AdamW(rest, lr=factor * 1e-3)
        if kinds == "different":
            second = torch.optim.SGD(rest, lr=factor * 1e-2, momentum=0.9)
        self.blocks = zeropg.shard_optimizer(first, self.model)
        self.rest = zeropg.shard_optimizer(second, self.model)

    def train(self, first: int, last: int) -> dict[str, torch.Tensor]:
        for batch in make_batches()[first:last]:
            loss_of(self.model, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
            for optimizer in (self.blocks, self.rest):
                optimizer.step()
                optimizer.zero_grad()
        return zeropg.full_state_dict(self.model, rank0_only=False)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kinds", ["same", "different"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_a_run_with_two_optimizers_goes_on_to_the_bit(tmp_path: Path, stage: int, kinds: str) -> None:
    run = Run(stage, kinds=kinds)
    run.train(0, 2)
    zeropg.save_checkpoint(tmp_path / "sequence", run.model, [run.blocks, run.rest])
    zeropg.save_checkpoint(tmp_path / "dict", run.model, {"blocks": run.blocks, "rest": run.rest})
    wanted = run.train(2, 4)

    again = Run(stage, kinds=kinds, seed=9, factor=7)
    zeropg.load_checkpoint(tmp_path / "sequence", again.model, (again.blocks, again.rest))
    assert same(again.train(2, 4), wanted)
    again = Run((stage + 1) % 4, kinds=kinds, seed=9, factor=7)
    zeropg.load_checkpoint(tmp_path / "dict", again.model, {"rest": again.rest, "blocks": again.blocks})
    assert same(again.train(2, 4), wanted), "from another stage, and named in another order"
    alone = Run(stage, kinds=kinds, seed=9)
    zeropg.load_checkpoint(tmp_path / "dict", alone.model)
    assert not alone.blocks.state and not alone.rest.state


def save_two(directory: Path) -> list[dict[str, torch.Tensor]]:
    wanted = []
    for stage in STAGES:
        run = Run(stage, dtype=torch.float64)
        run.train(0, 2)
        pending = zeropg.save_checkpoint(
            directory / str(stage), run.model, {"blocks": run.blocks, "rest": run.rest}, async_save=True
        )
        wanted.append(run.train(2, 4))
        assert pending is not None
        pending.wait()
    return wanted


def load_two(directory: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in STAGES:
        run = Run((stage + 2) % 4, dtype=torch.float64, seed=9, factor=7)
        zeropg.load_checkpoint(directory / str(stage), run.model, {"blocks": run.blocks, "rest": run.rest})
        found.append(run.train(2, 4))
    return found


def test_the_number_of_ranks_may_change(tmp_path: Path, rank_pool: Callable[..., RankPool]) -> None:
    wanted = rank_pool(2).run(save_two, tmp_path)[0]
    for world_size in (1, 3):
        for found in rank_pool(world_size).run(load_two, tmp_path):
            for stage in STAGES:
                assert all(close(found[stage][name], value) for name, value in wanted[stage].items())


def manifest_of(directory: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((directory / "zeropg_checkpoint.json").read_text())
    return value


@on_ranks(2)
def test_each_has_its_own_prefix_and_one_alone_is_saved_as_ever(tmp_path: Path) -> None:
    from safetensors import safe_open

    run = Run(3)
    run.train(0, 1)
    zeropg.save_checkpoint(tmp_path / "dict", run.model, {"blocks": run.blocks, "rest": run.rest})
    names: set[str] = set()
    for path in sorted((tmp_path / "dict").glob("data-*/optimizer*.safetensors")):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert "blocks/blocks.0.up.weight/exp_avg" in names and "rest/norm.weight/momentum_buffer" in names
    assert all(name.startswith(("blocks/blocks.", "rest/")) for name in names)
    assert manifest_of(tmp_path / "dict")["zeropg_checkpoint"] == 2

    for directory, optimizer in (("one", run.blocks), ("sequence of one", [run.blocks])):
        zeropg.save_checkpoint(tmp_path / directory, run.model, optimizer)
        manifest = manifest_of(tmp_path / directory)
        assert manifest["zeropg_checkpoint"] == 1
        assert manifest["manifest"]["optimizer"].keys() == {"class", "groups", "tensors", "numbers"}
        assert "optimizers" not in manifest["manifest"]
        for given in (run.blocks, (run.blocks,)):
            zeropg.load_checkpoint(tmp_path / directory, run.model, given)
    zeropg.save_checkpoint(tmp_path / "none", run.model, [])
    assert manifest_of(tmp_path / "none")["manifest"]["optimizer"] is None


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path, stage: int) -> None:
    run = Run(stage)
    run.train(0, 1)
    both = {"blocks": run.blocks, "rest": run.rest}
    zeropg.save_checkpoint(tmp_path / "both", run.model, both)
    zeropg.save_checkpoint(tmp_path / "one", run.model, run.blocks)
    before = run.train(1, 2)
    for directory, given, words in (
        ("one", both, ("holds one optimizer", "you gave 2 optimizers ('blocks', 'rest')")),
        ("both", run.blocks, ("holds 2 optimizers ('blocks', 'rest')", "you gave one optimizer", "optimizer=None")),
        ("both", {"blocks": run.blocks}, ("you gave optimizer 'blocks'",)),
        ("both", [run.blocks, run.rest], ("you gave 2 optimizers ('0', '1')", "the same names")),
        ("both", {"blocks": run.rest, "rest": run.blocks}, ("optimizer 'blocks' is a torch.optim.adamw.AdamW",)),
    ):
        with raises(ValueError, *words):
            zeropg.load_checkpoint(tmp_path / directory, run.model, given)
    assert same(zeropg.full_state_dict(run.model, rank0_only=False), before)

    other = Run(stage)
    for operation in (zeropg.save_checkpoint, zeropg.load_checkpoint):
        with raises(TypeError, "got a AdamW as optimizer 'b'", "zeropg.shard_optimizer returned"):
            operation(tmp_path, run.model, {"a": run.rest, "b": torch.optim.AdamW([nn.Parameter(torch.ones(1))])})
        with raises(TypeError, "an optimizer is called 3", "expected a str"):
            operation(tmp_path, run.model, {3: run.rest})
        with raises(ValueError, "an optimizer has the empty name"):
            operation(tmp_path, run.model, {"": run.rest})
        with raises(ValueError, "the optimizer '1' was sharded for another model"):
            operation(tmp_path, run.model, [run.blocks, other.rest])
        with raises(ValueError, "optimizers '0' and '1' are the same one"):
            operation(tmp_path, run.model, [run.blocks, run.blocks])
        with raises(TypeError, "got a str, expected what zeropg.shard_optimizer returned"):
            operation(tmp_path, run.model, "adamw")
    with raises(ValueError, "optimizer is", "on rank 0, but", "pass the same on every rank"):
        zeropg.save_checkpoint(tmp_path / "differs", run.model, [run.blocks, run.rest][: 1 + dist.get_rank()])
