"""Checkpoints that the real DeepSpeed makes, where it is installed: loaded, and exported beside its own script."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed.real_job import STEPS, batch
from tests.deepspeed.test_foreign_checkpoint import make
from tests.deepspeed.training import mean_over_ranks
from tests.spawn import RankPool
from tests.tools.test_export import check_same, exported, pickled
from zeropg import __main__ as program

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
JOBS = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]


def run(*command: Any) -> None:
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]}-{job[1]}")
def job(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    stage, dtype = request.param
    folder = tmp_path_factory.mktemp("deepspeed")
    run("-m", "tests.deepspeed.real_job", folder, stage, dtype)
    return folder, stage, dtype


def load(folder: Path, stage: int, dtype: str) -> None:
    import zeropg

    torch.set_num_threads(1)
    engine = make(stage, **({} if dtype == "fp32" else {dtype: {"enabled": True}}))
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None and client_state == {"epoch": 4} and engine.global_steps == STEPS
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
    weights = zeropg.full_state_dict(engine.module, rank0_only=False)
    truth = torch.load(folder / "truth.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in truth["masters"].items())
    tolerance = 1e-5 if dtype == "fp32" else 0.03  # in 16 bits it averages gradients in 16 bits, too
    found = losses(engine, len(truth["losses"]))
    assert found == pytest.approx(truth["losses"], rel=tolerance), (found, truth["losses"])


def losses(engine: Any, steps: int) -> list[float]:
    found = []
    for step in range(STEPS, STEPS + steps):
        x = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = torch.nn.functional.cross_entropy(engine(x).float(), x)
        engine.backward(loss)
        engine.step()
        found.append(mean_over_ranks(loss))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_it_saved_loads_to_the_last_bit(job: tuple[Path, int, str], world_size: int) -> None:
    folder, stage, dtype = job
    with RankPool(world_size) as pool:
        pool.run(load, folder, (stage + 2) % 4, dtype, timeout=120)


def test_exports_are_those_of_its_script(job: tuple[Path, int, str], tmp_path: Path) -> None:
    folder, stage, _ = job
    if stage == 0:
        pytest.skip("the script knows no stage 0")
    run(folder / "zero_to_fp32.py", folder, tmp_path / "theirs", "--max_shard_size", "1KB")
    ours = ["zero_to_fp32", str(folder), str(tmp_path / "ours"), "--max_shard_size", "1KB"]
    assert program.main(ours) == 0
    theirs, found = pickled(tmp_path / "theirs"), pickled(tmp_path / "ours")
    if stage == 1:  # the script leaves frozen parameters out
        found = {name: value for name, value in found.items() if not name.startswith("frozen.")}
    check_same(found, theirs)
    assert program.main(["export", str(folder), str(tmp_path / "safe"), "--dtype", "float32"]) == 0
    safe = exported(tmp_path / "safe")
    check_same({name: safe[name] for name in safe if name in theirs}, {n: v for n, v in theirs.items() if n in safe})
