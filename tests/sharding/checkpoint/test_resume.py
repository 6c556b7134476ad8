"""Saved on 2 ranks, loaded on 1 to 4 at any stage: training goes on as if nothing had happened."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sharding.checkpoint.resuming import (
    COMPACT,
    OPTIMIZERS,
    Run,
    load_and_go_on,
    relative_difference,
    same_bits,
    save_and_go_on,
)
from tests.spawn import RankPool

STAGES = (0, 1, 2, 3)
FP64, FP32 = torch.float64, torch.float32
Case = dict[str, Any]

# What was saved; every stage in both precisions, then every optimizer.
SAVED: list[Case] = [{"stage": stage, "dtype": dtype} for dtype in (FP64, FP32) for stage in STAGES]
SAVED += [
    {"stage": 3, "dtype": FP32 if name in COMPACT else FP64, "optimizer": name}
    for name in OPTIMIZERS
    if name != "adamw"
]
SAVED.append({"stage": 2, "dtype": FP32, "param_dtype": torch.bfloat16})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    directory = tmp_path_factory.mktemp("saved")
    with RankPool(2) as pool:
        results = pool.run(save_and_go_on, directory, SAVED, timeout=180)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    return directory, results[0]


@pytest.mark.parametrize("world_size", [2, 1, 3, 4])
def test_training_goes_on_at_any_world_size_and_stage(saved: tuple[Path, list[Run]], world_size: int) -> None:
    directory, expected = saved
    # From every stage to every stage; at the world size that saved, each stage is saved once and loaded once.
    cases: list[tuple[int, Case]] = [
        (index, case | {"stage": stage})
        for (index, case), stage in product(enumerate(SAVED), STAGES)
        if case["dtype"] == FP64
        and "optimizer" not in case
        and (world_size != 2 or stage == (case["stage"] + world_size) % 4)
    ]
    cases += [(i, case) for i, case in enumerate(SAVED) if case["dtype"] == FP32 and world_size in (2, 4)]
    cases += [(i, case | {"stage": 1}) for i, case in enumerate(SAVED) if "optimizer" in case and world_size != 2]
    with RankPool(world_size) as pool:
        results = pool.run(load_and_go_on, directory, cases, timeout=240)
    for rank, runs in enumerate(results):
        for (index, case), (run, rank_extra) in zip(cases, runs, strict=True):
            assert same_bits(run, runs_of(results[0], cases, index, case))
            difference = relative_difference(run, expected[index])
            if case["dtype"] == FP64:
                assert difference <= 1e-12, (index, case, difference)
            elif world_size == 2:  # masters of every stage have the same bits
                assert same_bits(run, expected[index]), (index, case, difference)
            else:
                is_coarse = "param_dtype" in case or case.get("optimizer") in COMPACT
                assert difference <= (0.02 if is_coarse else 1e-4), (index, case, difference)
            assert rank_extra is None if rank >= 2 else rank_extra["rank"] == rank


def runs_of(results: list[tuple[Run, Any]], cases: list[tuple[int, Case]], index: int, case: Case) -> Run:
    return results[cases.index((index, case))][0]
