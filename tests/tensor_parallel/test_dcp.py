"""torch.distributed.checkpoint saves and loads models whose parameters are DTensors as whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zeropg
from tests.sharding.ranks import equal
from tests.small_gpt import make_model
from tests.tensor_parallel.model import difference
from tests.tensor_parallel.test_checkpoint import AFTER, BEFORE, Trainer


def save(directory: Path, kind: tuple[int, int | None, int]) -> Any:
    trainer = Trainer(*kind)
    trainer.train(0, BEFORE)
    dcp.save(zeropg.dcp_state_dict(trainer.model, trainer.optimizer), checkpoint_id=directory)
    masters = zeropg.full_state_dict(trainer.model)
    return trainer.train(BEFORE, BEFORE + AFTER), masters


def load(directory: Path, kinds: list[tuple[int, int | None, int]]) -> list[Any]:
    runs = []
    for kind in kinds:
        trainer = Trainer(*kind)
        trainer.train(5, 6)
        dcp.load(zeropg.dcp_state_dict(trainer.model, trainer.optimizer), checkpoint_id=directory)
        runs.append(trainer.train(BEFORE, BEFORE + AFTER))
    return runs


def test_training_goes_on_with_any_mesh_and_stage(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(4)
    kinds: list[tuple[int, int | None, int]] = [(2, 2, 0), (2, 2, 3), (1, 4, 2), (4, 1, 1), (4, None, 2)]
    for index, kind in enumerate([(2, 2, 2), (4, None, 3)]):
        directory = tmp_path / str(index)
        expected, masters = pool.run(save, directory, kind, timeout=120)[0]
        others = kinds[1:] if index == 0 else kinds[:2]
        for of_rank in pool.run(load, directory, others, timeout=240):
            for how, run in zip(others, of_rank, strict=True):
                assert difference(run, expected) < 1e-12, how
        dcp_to_torch_save(directory, tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt")["model"]
        assert whole.keys() == make_model().state_dict().keys()
        assert all(equal(value, masters[name]) for name, value in whole.items())


def save_in_the_background(directory: Path) -> Any:
    trainer = Trainer(2, 2, 3)
    expected = zeropg.full_state_dict(trainer.model)
    try:
        dcp.async_save(zeropg.dcp_state_dict(trainer.model), checkpoint_id=directory)
    except RuntimeError as error:
        assert "dist.new_group" in str(error)
    else:
        raise AssertionError("over the group of all ranks")
    pending = dcp.async_save(
        zeropg.dcp_state_dict(trainer.model), checkpoint_id=directory, process_group=dist.new_group(backend="gloo")
    )
    trainer.train(0, 1)
    pending.result()
    return expected


def test_a_save_in_the_background_writes_what_was_there(rank_pool: Any, tmp_path: Path) -> None:
    expected = rank_pool(4).run(save_in_the_background, tmp_path / "saved", timeout=120)[0]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")["model"]
    assert all(equal(value, expected[name]) for name, value in whole.items())
