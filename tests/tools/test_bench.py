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

from tests.processes import run_program
from zeropg import __main__ as program
from zeropg.compression.codec import named_codecs
from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.cases import CASES, DTYPES, REDUCTIONS, Shape, empty_on_heap, pattern, reduced

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
QUICK = ["--rounds", "2", "--iterations", "2", "-w", "1", "--even-if-busy"]


def run(*arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeropg", *arguments]
    return run_program(command, timeout=timeout, env=ENVIRONMENT)


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
    together = [(row["size"], row["type"]) for row in document["results"] if row["experiment_name"] == "all_reduce"]
    assert together == [(8, "float"), (8, "bfloat16"), (4096, "float"), (4096, "bfloat16")]  # dtypes take turns
    for row in document["results"]:
        timing = row["in_place"] or row["out_of_place"]
        details = row.get("in_place_per_iter") or row["out_of_place_per_iter"]
        assert timing["time"] > 0 and timing["nwrong"] == 0
        assert details["min_us"] <= details["p50_us"] <= details["p99_us"] <= details["max_us"]
        assert details["times_copy"] > 0
        assert details["percent_of_bound"] > 0 or row["experiment_name"] == "barrier"
    assert {"commit", "torch", "cpu", "load_average", "cgroup_cpu_limit", "busy"} <= set(document["header"])
    assert not any("SECRET" in entry for entry in document["env"])
    assert document["ratios"]

    pytest.importorskip("matplotlib")
    from zeropg.tools.bench.plot import plot_collectives

    plot_collectives(document, plot)
    assert plot.read_text().lstrip().startswith("<?xml")


def test_ranks_beside_busy_processes(tmp_path):
    file = tmp_path / "busy_2_ranks.json"
    done = run("bench", "collectives", "-b", "8", "-e", "8", "--beside", "1", *QUICK, "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["config"]["beside"] == 1
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    table = run("bench", "table", "--folder", str(tmp_path))
    assert "all_reduce of 8 bytes, 2 rank(s) beside 1 busy processes: " in table.stdout


def test_tensors_in_shared_memory_are_a_peer(tmp_path):
    file = tmp_path / "out.json"
    shape = ["-b", "64", "-e", "64K", "-f", "1024", "--op", "all", "--peers", "zeropg_arena,zeropg", *QUICK]
    done = run("bench", "collectives", *shape, "--output", str(file))
    if "has no tensors in shared memory" in done.stderr:
        pytest.skip("this build's groups allocate no tensors")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["backend"] == "zeropg_arena"
    assert {row["experiment_name"] for row in document["results"]} == set(CASES)
    assert {entry["over"] for entry in document["ratios"]} == {"zeropg"}


def test_open_mpi_is_a_peer_whose_mpirun_starts_the_ranks(tmp_path):
    pytest.importorskip("mpi4py", reason="requirements/bench.txt is not installed")
    file = tmp_path / "out.json"
    shape = ["-b", "64", "-e", "4K", "-f", "64", "--op", "all", "-d", "float,bfloat16"]
    done = run("bench", "collectives", *shape, "--peers", "zeropg,openmpi", *QUICK, "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert "Open MPI" in document["header"]["openmpi"]
    theirs = document["peers"]["openmpi"]["results"]
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive"} <= {
        row["experiment_name"] for row in theirs
    }
    assert not [row for row in theirs if row["experiment_name"] == "all_reduce" and row["type"] == "bfloat16"]


def test_ranks_of_mpirun_are_known_only_when_asked(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    importing = [sys.executable, "-c", "import os, zeropg.tools.bench.collectives; assert 'RANK' not in os.environ"]
    subprocess.run(importing, check=True, timeout=150)
    assert not harness.is_a_rank()
    monkeypatch.setenv("RANK", "")  # so that what follows is undone
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("LOCAL_RANK", "")
    harness.take_rank_from_mpi()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


def test_the_table_says_what_the_files_say(tmp_path, capsys):
    assert program.main(["bench", "table", "--folder", str(tmp_path)]) == 2
    assert "run make bench" in capsys.readouterr().err

    def rows(times: dict[int, float], dtype: str = "float") -> list[dict]:
        details = {"p99_us": 2.0, "percent_of_bound": 90.0, "times_copy": 1.25}
        return [
            {"experiment_name": "all_reduce", "size": size, "type": dtype, "in_place_per_iter": details | {
                "p50_us": us, "round_medians_us": [us]}}
            for size, us in times.items()
        ]  # fmt: skip

    document = {
        "header": {"busy": False},
        "backend": "zeropg",
        "config": {"ranks": 2},
        "results": rows({1024: 1.0, 65536: 2.0, 64 << 20: 100.0}),
        "peers": {"gloo": {"results": rows({1024: 10.0, 65536: 40.0, 64 << 20: 250.0})}},
    }
    harness.write_json(tmp_path / "collectives_2_ranks.json", document)
    both = {"results": rows({1024: 1.0}) + rows({1024: 2.0}, "bfloat16"), "peers": {}}
    harness.write_json(tmp_path / "dtypes_2_ranks.json", document | both | {"header": {"busy": True}})
    harness.write_json(tmp_path / "latency_1_rank.json", document)
    groups = {"header": {"busy": False, "ranks": 16}, "table": {"zeropg first": {"ms": 32.0, "ms_per_rank": 2.0}}}
    harness.write_json(tmp_path / "groups_16_ranks.json", groups)
    assert program.main(["bench", "table", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "| 2 | all_reduce | ordinary | 10.0-20.0 |  | 2.5-2.5 | 90 | 1.25 | 3 of 3 sizes |" in said
    assert "0.50-0.50 of float's rate in bytes" in said
    assert "all_reduce of 1024 bytes, 2 rank(s): 1.0 us (p99 2.0), gloo 10.0 us." in said
    assert "zeropg first group of 16 ranks: 32.0 ms, 2.00 ms per rank." in said
    assert "proving nothing: dtypes_2_ranks." in said


def test_making_groups_is_timed(tmp_path):
    file = tmp_path / "groups.json"
    done = run("bench", "groups", "-n", "3", "--rounds", "2", "--warm-up", "0", "--even-if-busy", "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())["table"]
    assert set(table) == {"zeropg first", "zeropg further", "gloo first", "gloo further"}
    for row in table.values():
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]
        assert row["ms_per_rank"] == pytest.approx(row["ms"] / 3)
    assert table["gloo first"]["times_faster"]["median"] == 1.0


@pytest.mark.parametrize("name", sorted(set(CASES) - {"barrier", "broadcast", "scatter", "dist_all_reduce"}))
def test_an_operation_that_does_nothing_is_wrong(name):
    class Idle:
        """Answers every call and moves no byte."""

        def __getattr__(self, operation: str) -> object:
            class Work:
                def wait(self) -> None:
                    pass

            return lambda *arguments: Work()

    shape = Shape(64, torch.float32, "sum" if CASES[name].reduces else "none", rank=0, world_size=2)
    buffers = CASES[name].make(shape, False, empty_on_heap)
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
    from zeropg.tools.bench import optimizer

    real = optimizer._theirs
    monkeypatch.setattr(optimizer, "_theirs", lambda name, start, *rest: real(name, start + 1e-3, *rest))
    assert program.main(["bench", "optimizer", "--numel", "1K", "--even-if-busy"]) == harness.WRONG
    assert "differs from torch's plain loop" in capsys.readouterr().err


def test_codecs_are_checked_and_timed(tmp_path):
    file = tmp_path / "compression.json"
    assert program.main(["bench", "compression", "--bytes", "64K", "--even-if-busy", "--output", str(file)]) == 0
    table = json.loads(file.read_text())["table"]
    assert set(table) == set(named_codecs())
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
    monkeypatch.setattr(machine, "others_load_now", lambda seconds=1.0: 1.5)
    for suite in ("collectives", "groups", "train", "optimizer", "compression"):
        assert program.main(["bench", suite]) == harness.BUSY
        assert "others keep 1.50 CPUs busy" in capsys.readouterr().err


def test_load_that_comes_later_takes_the_ratios_back():
    quiet = harness.Quiet(even_if_busy=False, limit_cpus=0.2, others_before=0.0, others_during=0.9)
    assert not quiet.may_claim and "0.90 CPUs" in quiet.refusal()
    assert harness.Quiet(even_if_busy=True, limit_cpus=0.2, others_during=0.9).may_claim


def test_others_load_does_not_count_ones_own_work():
    load, start = machine.OthersLoad(), time.process_time()
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
        (["bench", "collectives", "--beside", "-1"], "--beside not negative"),
        (["bench", "compression", "--codec", "int3"], "no int3; there is all, int8, int4"),
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
