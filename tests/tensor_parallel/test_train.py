"""Models whose parameters are DTensors train beside sharding as one plain process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tensor_parallel.model import Run, difference, make_mesh, train, train_alone


def train_all(dtype: torch.dtype) -> dict[str, Run]:
    torch.set_num_threads(1)
    mesh = make_mesh(2, 2)
    runs = {f"stage {stage}": train(mesh, dtype, stage=stage) for stage in (0, 1, 2, 3)}
    runs["one copy of the batch"] = train(make_mesh(1, 4), dtype, stage=2)
    runs["one part of the tensors"] = train(make_mesh(4, 1), dtype, stage=3)
    return runs


@pytest.mark.parametrize("backend", ["zeropg", pytest.param("gloo", marks=pytest.mark.soak)])
def test_all_stages_train_as_one_process(rank_pool: Any, backend: str) -> None:
    plain = train_alone(torch.float64)
    for of_rank in rank_pool(4, backend).run(train_all, torch.float64, timeout=240):
        for name, run in of_rank.items():
            assert difference(run, plain) < 1e-12, name
        for stage in (1, 2, 3):
            assert of_rank[f"stage {stage}"][2] == of_rank["stage 0"][2], "norms have the same bits"
