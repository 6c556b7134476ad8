"""`python -m zeropg tune`: what it tries and why, and that it finds what a full grid finds."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.processes import kill_with_children, lives
from tests.spawn import run_ranks
from tests.test_cpp import ROOT
from zeropg.deepspeed.config import read
from zeropg.deepspeed.observation.observer import Clock, Facts
from zeropg.deepspeed.observation.trial import Report, Sizes, Trial, TrialRun
from zeropg.tools.plan.formulas import Settings
from zeropg.tools.tune import command
from zeropg.tools.tune.candidates import (
    Candidate,
    config_of,
    micro_batches,
    needed_bytes,
    plan_of,
    sent_bytes,
    shape_of,
)
from zeropg.tools.tune.search import Outcome, Search, Space
from zeropg.tools.tune.trial import Script, config_argument, with_config

BASE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def test_micro_batches_divide_the_batch_and_double() -> None:
    assert micro_batches(16, 2) == [1, 2, 4, 8]
    assert micro_batches(24, 1) == [1, 2, 4, 8, 24]
    assert micro_batches(36, 2) == [1, 2, 6, 18]
    assert micro_batches(2, 2) == [1]


def test_a_candidates_configuration_keeps_what_is_learnt() -> None:
    config = config_of(BASE, Candidate(1, 2), 16, 2)
    assert config == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "optimizer": BASE["optimizer"],
    }
    zero = config_of(BASE, Candidate(3, 8, "/nvme"), 16, 2)["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu"}
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/nvme"}


def test_plans_know_where_the_configuration_has_the_optimizers_state() -> None:
    sizes = Sizes(2, 2, "cpu", [[([1000, 64], "torch.float32", True)]])
    needed = []
    for block in ({"device": "none"}, {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5}):
        config = config_of(BASE | {"zero_optimization": {"offload_optimizer": block}}, Candidate(1, 2), 16, 2)
        assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": block}
        needed.append(needed_bytes(shape_of(sizes), plan_of(read(config, world_size=2), Candidate(1, 2), sizes)))
    assert needed[1] < needed[0]


class Ticks(Clock):
    """A clock on which each look takes a second more than the one before."""

    def __init__(self) -> None:
        self._times = itertools.accumulate(itertools.count())

    def now(self) -> float:
        return float(next(self._times))


def time_whole_steps(folder: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    run = TrialRun(Trial(str(folder / "report"), 1, 2), group, Ticks())
    run.begin("forward", [torch.empty(7, 2)])
    with pytest.raises(SystemExit):
        for step, skipped in enumerate((1, 2, 2, 2, 3, 3), 1):
            run.updated(Facts(step, skipped, 8, 4, [], [], 8 * step, None, None))
    # The third update warms up; the fourth and the sixth are timed.
    report = json.loads((folder / "report").read_text())
    assert (report["seconds"], report["micro_batch"], report["rows"]) == ([4.0, 6.0], 4, 7)
    endless = TrialRun(Trial(str(folder / "none"), 0, 1), group, Ticks())
    endless.begin("forward", [])
    with pytest.raises(SystemExit, match="101 steps had gradients that are not finite"):
        for step in range(1, 200):
            endless.updated(Facts(step, step, 8, 4, [], [], 8 * step, None, None))


def test_steps_that_the_loss_scale_leaves_out_are_not_timed(tmp_path: Path) -> None:
    run_ranks(1, time_whole_steps, tmp_path)


def test_the_file_of_the_configuration_is_found_and_replaced() -> None:
    for words in (["a.py", "--deepspeed_config", "x.json", "-v"], ["a.py", "--deepspeed_config=x.json", "-v"]):
        assert config_argument(words) == "x.json"
        assert config_argument(with_config(words, Path("/new.json"))) == "/new.json"
    assert config_argument(["a.py", "--deepspeed"]) is None


def test_plans_are_zeropg_plans() -> None:
    sizes = Sizes(4, 2, "cpu", [[([8, 32], "torch.float32", True)], [([1000, 64], "torch.float32", True)]])
    shape = shape_of(sizes)
    assert shape.parameters == 8 * 32 + 64000
    config = read(BASE | {"bf16": {"enabled": True}}, world_size=2)
    plans = [plan_of(config, Candidate(stage, 1), sizes) for stage in range(4)]
    assert (plans[3].nodes, plans[3].ranks, plans[3].optimizer) == (2, 4, "adamw")
    needed = [needed_bytes(shape, plan) for plan in plans]
    assert needed[0] > needed[1] and needed[0] > needed[3]
    # Stages 2 and 3 pay for each micro-batch.
    once, often = ([sent_bytes(shape, plan, steps) for plan in plans] for steps in (1, 4))
    assert once[0] == often[0] and once[1] == often[1] and once[2] < often[2] < 4 * once[2]
    assert often[3] == pytest.approx(4 * once[3])
    assert isinstance(plans[0], Settings)


def space(memory: int = 1000, planned: Callable[[Candidate], int] = lambda candidate: 100, **more: Any) -> Space:
    parts: dict[str, Any] = {"stages": [0, 1, 2, 3], "micro_batches": [1, 2, 4, 8, 16], "offload": ""}
    return Space(**parts | {"planned_bytes": planned, "refusal": lambda candidate: "", "memory_bytes": memory} | more)


# Samples per second: of the stages, times those of the micro-batches.
STAGES = ([1.0, 1.1, 1.08, 1.3], [1.2, 1.1, 1.0, 0.7], [1.0, 1.0, 1.0, 1.0])
BATCHES = ([1.0, 1.6, 2.2, 2.5, 2.6], [2.0, 2.4, 2.2, 1.6, 1.0], [3.0, 2.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("stages", "batches"), list(itertools.product(STAGES, BATCHES)))
def test_the_search_finds_what_a_grid_finds_in_fewer_runs(stages: list[float], batches: list[float]) -> None:
    runs: list[Candidate] = []
    # What stages 2 and 3 send for each micro-batch costs more where these are small.
    speeds = {
        Candidate(stage, 2**power): stages[stage] * batches[power] / (1 + (0.1 if stage >= 2 else 0) / 2**power)
        for stage in range(4)
        for power in range(5)
    }

    def run(candidate: Candidate) -> Outcome:
        runs.append(candidate)
        return Outcome(speeds[candidate], 100)

    best = Search(space(), run, rounds=0).best()
    assert best is not None and speeds[best.candidate] >= 0.95 * max(speeds.values())
    assert len(runs) == len(set(runs)) <= 11


def test_what_does_not_fit_is_not_run_and_says_why() -> None:
    def planned(candidate: Candidate) -> int:
        return 600 - 150 * candidate.stage

    runs = []

    def run(candidate: Candidate) -> Outcome:  # each sample takes 60
        runs.append(candidate)
        return Outcome(float(candidate.micro_batch), planned(candidate) + 60 * candidate.micro_batch)

    search = Search(space(500, planned), run, rounds=0)
    best = search.best()
    assert best is not None and best.candidate == Candidate(3, 4)
    why = {row.candidate: row.problem for row in search.rows.values() if row.problem}
    assert why[Candidate(0, 1)] == "its model states do not fit"
    assert why[Candidate(3, 8)] == "expected not to fit, by what smaller micro-batches needed"
    assert why[Candidate(3, 16)] == "micro-batch 8 failed"
    assert Candidate(2, 4) not in runs and why[Candidate(2, 4)].startswith("expected not to fit")


def test_the_disk_is_for_what_fits_nowhere_else() -> None:
    def planned(candidate: Candidate) -> int:
        return 2000 - (1500 if candidate.offload else 0)

    best = Search(space(1000, planned, offload="/nvme"), lambda candidate: Outcome(1.0, 600), rounds=0).best()
    assert best is not None and best.candidate.offload == "/nvme"
    assert Search(space(1000, planned), lambda candidate: Outcome(1.0), rounds=0).best() is None


def test_a_stage_that_fails_leaves_the_others() -> None:
    def run(candidate: Candidate) -> Outcome:
        return Outcome(None, problem="boom") if candidate.stage == 3 else Outcome(float(candidate.micro_batch))

    search = Search(space(), run, rounds=1)
    best = search.best()
    assert best is not None and (best.candidate.stage, best.candidate.micro_batch) in ((0, 16), (1, 16), (2, 16))
    assert search.rows[Candidate(3, 1)].problem == "boom"


def test_one_lucky_run_does_not_decide() -> None:
    speeds = {Candidate(3, 1): iter([1.0, 0.8, 0.8]), Candidate(2, 1): iter([0.98, 0.98, 0.98])}
    only = space(stages=[2, 3], micro_batches=[1])
    best = Search(only, lambda candidate: Outcome(next(speeds[candidate])), rounds=2).best()
    assert best is not None and best.candidate == Candidate(2, 1) and best.speeds == [0.98, 0.98, 0.98]


# --- Real runs ---

SCRIPT = """
import argparse
import torch
import zeropg.deepspeed as deepspeed
from tests.small_gpt import SmallGPT, loss_of, make_batches

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--rows", type=int)
parser.add_argument("--width", type=int, default=32)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
model = SmallGPT(width=args.width, heads=4, layers=3)
engine, _, loader, _ = deepspeed.initialize(args=args, model=model, training_data=make_batches().flatten(0, 1))
for epoch in range(1000):
    for batch in loader:
        engine.backward(loss_of(engine, batch[: args.rows]))
        engine.step()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script and its configuration are; the current one."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(zeropg.__file__).parents[1]}:{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    base = {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}
    (tmp_path / "ds.json").write_text(json.dumps(base))
    return tmp_path


class PretendedScript:
    """Runs whose reports are known: the larger the stage and the micro-batch, the faster, of one row at a time."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def sizes(self, config: dict[str, Any]) -> Sizes:
        return Sizes(2, 2, "cpu", [[([1000, 64], "torch.float32", True)]])

    def time(self, config: dict[str, Any], *, warm_up: int, steps: int) -> Report:
        stage, micro_batch = config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]
        return Report([1.0 / (stage + micro_batch)] * steps, config["train_batch_size"], micro_batch, 1, [1, 1])


def test_the_table_says_why_each_was_run_and_which_gave_other_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Script", PretendedScript)
    assert command.main(["--stages", "1,3", "--output", "tuned.json", "train.py", "--deepspeed_config", "ds.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("64,000 parameters, 2 ranks, 4 samples per step")
    rows = {tuple(map(int, line.split()[:3])): line for line in lines[2:5]}
    assert list(rows) == [(3, 2, 1), (3, 1, 2), (1, 2, 1)]
    assert "100%" in rows[3, 2, 1] and rows[3, 2, 1].endswith("the fastest (a larger micro-batch)")
    assert "80%" in rows[3, 1, 2] and rows[3, 1, 2].endswith("the smallest micro-batch")
    assert "60%" in rows[1, 2, 1] and rows[1, 2, 1].endswith("another stage than 3")
    assert lines[5].startswith("Note: the script gave the model 1 samples at once, and not the 2 of")
    assert lines[-1] == "stage 3, micro-batch 2 won: tuned.json"
    tuned = json.loads((folder / "tuned.json").read_text())
    assert (tuned["zero_optimization"]["stage"], tuned["train_micro_batch_size_per_gpu"]) == (3, 2)


@pytest.mark.soak
@pytest.mark.parametrize(("train_batch", "stages"), [(2, "3"), (4, "1,3")], ids=["one", "several"])
def test_a_script_is_tuned_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], train_batch: int, stages: str
) -> None:
    base = json.loads((folder / "ds.json").read_text()) | {"train_batch_size": train_batch}
    (folder / "ds.json").write_text(json.dumps(base))
    options = ["--num_gpus", "2", "--stages", stages, "--steps", "3", "--rounds", "0", "--output", "tuned.json"]
    assert command.main([*options, "train.py", "--deepspeed_config", "ds.json"]) == 0
    text = capsys.readouterr().out
    tuned = json.loads((folder / "tuned.json").read_text())
    assert tuned["train_batch_size"] == train_batch and tuned["optimizer"] == {"type": "AdamW"}
    stage, micro = tuned["zero_optimization"]["stage"], tuned["train_micro_batch_size_per_gpu"]
    assert str(stage) in stages.split(",") and micro * tuned["gradient_accumulation_steps"] * 2 == train_batch
    lines = text.splitlines()
    assert lines[0].startswith("40,") and f"2 ranks, {train_batch} samples per step" in lines[0]
    assert lines[1].split()[:3] == ["stage", "micro-batch", "accumulation"]
    assert lines[2].split()[:3] == [str(stage), str(micro), str(train_batch // (2 * micro))]
    assert "the fastest (" in lines[2] and "the smallest micro-batch" in text and "Note" not in text
    assert ("another stage than 3" in text) == (stages != "3")
    assert lines[-1] == f"stage {stage}, micro-batch {micro} won: tuned.json"
    assert sorted(path.name for path in folder.iterdir()) == ["ds.json", "train.py", "tuned.json"]


@pytest.mark.slow
def test_a_script_that_fails_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert command.main(["--num_gpus", "1", "train.py", "--deepspeed_config", "ds.json"]) == 1
    said = capsys.readouterr().err
    assert "unrecognized arguments: --deepspeed_config" in said and "failed before it had an engine" in said


@pytest.mark.soak
def test_a_script_that_gives_other_batches_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num_gpus", "1", "--stages", "0", "--steps", "1", "--rounds", "0"]
    (folder / "ds.json").write_text(json.dumps({"train_batch_size": 2, "optimizer": {"type": "AdamW"}}))
    assert command.main([*options, "train.py", "--deepspeed_config", "ds.json", "--rows", "1"]) == 0
    assert "Note: the script gave the model 1 samples at once, and not the 2 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script"),
        (["train.py"], "expected --deepspeed_config FILE"),
        (["--stages", "4", "train.py"], "expected stages like 0,1,2,3"),
        (["--steps", "0", "train.py", "--deepspeed_config", "x"], "--steps is 0, expected at least 1"),
        (["train.py", "--deepspeed_config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.soak
def test_what_is_found_is_within_5_percent_of_a_full_grid(folder: Path) -> None:
    """On a quiet machine: the grid and what was found, in turns."""
    arguments = ["train.py", "--deepspeed_config", "ds.json", "--width", "128"]
    base = json.loads((folder / "ds.json").read_text()) | {"train_batch_size": 32}
    (folder / "ds.json").write_text(json.dumps(base))
    assert command.main(["--num_gpus", "2", "--output", "tuned.json", *arguments]) == 0
    tuned = json.loads((folder / "tuned.json").read_text())
    found = Candidate(tuned["zero_optimization"]["stage"], tuned["train_micro_batch_size_per_gpu"])
    script = Script(["--num_gpus", "2"], arguments, 600)
    grid = [Candidate(stage, micro) for stage in range(4) for micro in micro_batches(32, 2)]
    speeds: dict[Candidate, list[float]] = {candidate: [] for candidate in grid}
    for _ in range(3):
        for candidate in grid:
            report = script.time(config_of(base, candidate, 32, 2), warm_up=2, steps=8)
            speeds[candidate].append(report.samples / sorted(report.seconds)[len(report.seconds) // 2])
    medians = {candidate: sorted(runs)[1] for candidate, runs in speeds.items()}
    best = max(medians, key=lambda candidate: medians[candidate])
    print({str(candidate): round(speed, 1) for candidate, speed in medians.items()}, "found:", found)
    assert medians[found] >= 0.95 * medians[best], (found, best, medians)


ENDLESS = """
import os, time
print("rank", os.getpid(), flush=True)
open(f"rank{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.slow
def test_sigterm_ends_the_run_of_the_moment_and_takes_its_folder_away(folder: Path) -> None:
    (folder / "train.py").write_text(ENDLESS)
    words = ["-m", "zeropg", "tune", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json"]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            ranks = [folder / "rank0", folder / "rank1"]
            start = time.monotonic()
            while not all(path.exists() and path.read_text() for path in ranks):
                assert process.poll() is None and time.monotonic() - start < 120
                time.sleep(0.1)
            process.terminate()
            _, said = process.communicate(timeout=120)
        except BaseException:
            kill_with_children(process.pid)
            raise
    assert process.returncode == 143 and "zeropg tune: SIGTERM: the run is stopped" in said, said
    assert not list(folder.glob(".zeropg-tune-*"))
    assert not [path for path in ranks if lives(int(path.read_text()))]
