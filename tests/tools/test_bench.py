"""`python -m zeropg bench`: results are proven, files hold what they promise, busy machines are noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zeropg import __main__ as program
from zeropg import _machine
from zeropg.bench import harness
from zeropg.bench.cases import CASES, DTYPES, REDUCTIONS, Shape, pattern, reduced

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
QUICK = ["--rounds", "2", "--iterations", "2", "-w", "1", "--even-if-busy"]


def run(*arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeropg", *arguments]
    return subprocess.run(command, capture_output=True, check=False, text=True, timeout=timeout, env=ENVIRONMENT)


def test_collectives_check_time_and_file_every_operation(tmp_path):
    file, plot = tmp_path / "out.json", tmp_path / "out.svg"
    shape = ["-b", "8", "-e", "4K", "-f", "512", "-d", "float,bfloat16", "--op", "all", *QUICK]
    done = run("bench", "collectives", *shape, "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "out-of-place" in done.stdout and "times faster: zeropg than its peers" in done.stdout

    document = json.loads(file.read_text())
    # nccl-tests' JSON, which other tools parse.
    for key in ("version", "start_time", "args", "env", "config", "devices", "results", "out_of_bounds", "end_time"):
        assert key in document
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert {row["experiment_name"] for row in document["results"]} == set(CASES)
    assert {row["experiment_name"] for row in document["peers"]["gloo"]["results"]} == set(CASES)
    for row in document["results"]:
        timing = row["in_place"] or row["out_of_place"]
        details = row.get("in_place_per_iter") or row["out_of_place_per_iter"]
        assert timing["time"] > 0 and timing["nwrong"] == 0
        assert details["min_us"] <= details["p50_us"] <= details["p99_us"] <= details["max_us"]
    assert {"commit", "torch", "cpu", "load_average", "cgroup_cpu_limit", "busy"} <= set(document["header"])
    assert not any("SECRET" in entry for entry in document["env"])
    assert document["ratios"]

    pytest.importorskip("matplotlib")
    from zeropg.bench.plot import plot_collectives

    plot_collectives(document, plot)
    assert plot.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("barrier", "broadcast", "scatter")])
def test_an_operation_that_does_nothing_is_wrong(name):
    class Idle:
        """Answers every call and moves no byte."""

        def __getattr__(self, operation: str) -> object:
            class Work:
                def wait(self) -> None:
                    pass

            return lambda *arguments: Work()

    shape = Shape(64, torch.float32, "sum" if CASES[name].reduces else "none", rank=0, world_size=2)
    buffers = CASES[name].make(shape, False)
    buffers.fill()
    buffers.call(Idle())
    assert buffers.wrong() > 0


@pytest.mark.parametrize("redop", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_are_exact_in_every_dtype(dtype, redop):
    """The expected value survives in the dtype itself, added in any order, so one wrong element always shows."""
    kind = DTYPES[dtype]
    for world_size in (2, 4, 5):
        shape = Shape(100, kind, redop, rank=0, world_size=world_size)
        parts = [pattern(shape, rank, 0, 100).double() for rank in range(world_size)]
        total = torch.stack(parts)
        whole = {
            "sum": total.sum(0),
            "prod": total.prod(0),
            "max": total.max(0).values,
            "min": total.min(0).values,
            "avg": total.mean(0),
        }[redop]
        if kind == torch.bool:
            assert redop == "avg" or torch.equal(reduced(shape, 0, 100), whole != 0)
        else:
            assert torch.equal(whole.to(kind).double(), whole)
            assert torch.equal(reduced(shape, 0, 100), whole.to(kind))


def test_train_measures_an_implementation_beside_the_baseline(tmp_path):
    file = tmp_path / "train.json"
    small = ["--rounds", "1", "--steps", "2", "--warm-up", "1", "--layers", "2", "--width", "64"]
    done = run("bench", "train", *small, "--only", "zeropg stage 3", "--even-if-busy", "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())["table"]
    assert set(table) == {"ddp gloo", "zeropg stage 3"}
    assert table["ddp gloo"]["step_over_ddp"]["median"] == 1.0
    assert table["zeropg stage 3"]["step_ms"] > 0


def test_optimizer_steps_agree_and_are_timed(tmp_path):
    file = tmp_path / "optimizer.json"
    for name in ("adamw", "sgd"):
        small = ["--optimizer", name, "--numel", "20K", "--rounds", "2", "--even-if-busy", "--output", str(file)]
        assert program.main(["bench", "optimizer", *small]) == 0
        tables = json.loads(file.read_text())["tables"]
        assert set(tables) == {"float32", "bfloat16"}
        for rows in tables.values():
            assert rows["zeropg fused"]["times_zeropgs"]["median"] == 1.0
            assert {name for name in rows} == {"zeropg fused", "torch fused", "torch foreach", "torch for-loop"}


def test_an_optimizer_that_computes_something_else_is_not_timed(monkeypatch, capsys):
    from zeropg.bench import optimizer

    real = optimizer._theirs
    monkeypatch.setattr(optimizer, "_theirs", lambda name, start, *rest: real(name, start + 1e-3, *rest))
    assert program.main(["bench", "optimizer", "--numel", "1K", "--even-if-busy"]) == harness.WRONG
    assert "differs from torch's plain loop" in capsys.readouterr().err


def test_codecs_are_checked_and_timed(tmp_path):
    file = tmp_path / "compression.json"
    assert program.main(["bench", "compression", "--bytes", "64K", "--even-if-busy", "--output", str(file)]) == 0
    table = json.loads(file.read_text())["table"]
    assert table["int8"]["percent_of_fp32"] == pytest.approx(25.2, abs=0.1)
    assert table["int4"]["percent_of_fp32"] == pytest.approx(12.7, abs=0.1)
    assert 0 < table["int8"]["relative_l2_error"] < table["int4"]["relative_l2_error"] < 0.2


def test_a_tier_is_checked_and_timed(tmp_path):
    file = tmp_path / "offload.json"
    small = ["--path", str(tmp_path), "--bytes", "1M", "--numel", "100K", "--rounds", "2", "--even-if-busy"]
    done = run("bench", "offload", *small, "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["step"]["tier_ms"] > 0


def test_a_busy_machine_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(_machine, "others_load_now", lambda seconds=1.0: 1.5)
    for suite in ("collectives", "train", "optimizer"):
        assert program.main(["bench", suite]) == harness.BUSY
        assert "others keep 1.50 CPUs busy" in capsys.readouterr().err


def test_load_that_comes_later_takes_the_ratios_back():
    quiet = harness.Quiet(even_if_busy=False, limit_cpus=0.2, others_before=0.0, others_during=0.9)
    assert not quiet.may_claim and "0.90 CPUs" in quiet.refusal()
    assert harness.Quiet(even_if_busy=True, limit_cpus=0.2, others_during=0.9).may_claim


def test_others_load_does_not_count_ones_own_work():
    load, start = _machine.OthersLoad(), time.process_time()
    while time.process_time() - start < 0.5:
        pass
    mine = time.process_time() - start
    others = load.stop(mine)
    assert 0 <= others <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "nothing"], "no suite 'nothing'"),
        (["bench", "collectives", "--op", "all_reduze"], "no all_reduze; there is all, all_reduce"),
        (["bench", "collectives", "-b", "1X"], "'1X' is no size"),
        (["bench", "collectives", "-b", "1M", "-e", "1K"], "-e 1024 is less than -b"),
        (["bench", "collectives", "-f", "1"], "-f 1 is less than 2"),
        (["bench", "train", "--width", "100"], "no multiple of 64"),
        (["bench", "train", "--rounds", "0"], "--rounds must be positive"),
    ],
)
def test_wrong_options_are_one_clear_error(capsys, arguments, words):
    try:
        status = program.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "collectives", "--help"], ["bench"]])
def test_help_shows_examples(capsys, arguments):
    try:
        status = program.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 0
    assert "examples:" in capsys.readouterr().out


def test_files_appear_whole(tmp_path: Path):
    file = tmp_path / "folder" / "x.json"
    harness.write_json(file, {"a": 1})
    assert harness.read_json(file) == {"a": 1}
    assert [path.name for path in file.parent.iterdir()] == ["x.json"]
