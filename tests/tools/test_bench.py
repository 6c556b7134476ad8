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

from tests.commands import AGENT_STORE, run_forked
from tests.processes import run_program
from tests.spawn import RanksFailed, run_ranks
from zeropg import __main__ as program
from zeropg.compression.codec import named_codecs
from zeropg.tools import machine
from zeropg.tools.bench import collectives, groups, harness
from zeropg.tools.bench.cases import CASES, DTYPES, REDUCTIONS, Shape, empty_on_heap, pattern, reduced
from zeropg.tools.bench.compression import codecs
from zeropg.tools.bench.deepspeed import script
from zeropg.tools.bench.deepspeed.command import Case, disagreement
from zeropg.tools.bench.results import Row, Spread, read_results, write_results

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
QUICK = ["--rounds", "2", "--iterations", "2", "-w", "1", "--even-if-busy"]


@pytest.fixture
def forked_ranks(monkeypatch):
    """A suite's ranks are forked with torch in them; torchrun, which loads it anew in each, is the first test's."""

    def start(ranks: int, arguments: list[str], **options: bool) -> int:
        return run_forked(*arguments, ranks=ranks).returncode

    monkeypatch.setattr(harness, "start_ranks", start)


def test_collectives_check_time_and_file_every_operation(tmp_path):
    file, raw, plot = (tmp_path / name for name in ("out.json", "raw.json", "out.svg"))
    shape = ["-b", "8", "-e", "4K", "-f", "512", "-d", "float,bfloat16", "--op", "all", *QUICK]
    command = [sys.executable, "-m", "zeropg", "bench", "collectives", *shape]
    done = run_program([*command, "--output", str(file), "--raw", str(raw)], timeout=150, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "out-of-place" in done.stdout and "times faster: zeropg than its peers" in done.stdout

    header, rows = read_results(file)
    assert {"suite", "command", "commit", "torch", "cpu", "load_average", "cgroup_cpu_limit", "busy"} <= set(header)
    assert {(row.case, row.peer) for row in rows} == {(case, peer) for case in CASES for peer in ("zeropg", "gloo")}
    for row in rows:
        spread = row.figures["time_us"]
        assert isinstance(spread, Spread) and 0 < spread.low <= spread.median <= spread.high
        assert spread.median <= row.median("p99_us") and row.median("times_copy") > 0
        assert row.median("percent_of_bound") > 0 or row.case == "barrier"
        assert f"faster_than_{'gloo' if row.peer == 'zeropg' else 'zeropg'}" in row.figures
        assert ("faster_than_float" in row.figures) == (row.parameters["dtype"] == "bfloat16")

    document = json.loads(raw.read_text())
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
        assert len(details["round_medians_us"]) == 2

    pytest.importorskip("matplotlib")
    from zeropg.tools.bench.plot import plot_collectives

    plot_collectives(header, rows, plot)
    assert plot.read_text().lstrip().startswith("<?xml")


def test_tensors_in_shared_memory_are_a_peer_beside_busy_processes_too(forked_ranks, tmp_path, capsys):
    file = tmp_path / "busy_2_ranks.json"
    shape = ["-b", "8", "-e", "64K", "-f", "8192", "--op", "all", "--peers", "zeropg_arena,zeropg", "--beside", "1"]
    try:
        assert program.main(["bench", "collectives", *shape, *QUICK, "--output", str(file)]) == 0
    except RanksFailed as failed:
        if "has no tensors in shared memory" in str(failed):
            pytest.skip("this build's groups allocate no tensors")
        raise
    header, rows = read_results(file)
    assert header["beside"] == 1
    assert {row.case for row in rows if row.peer == "zeropg_arena"} == set(CASES)
    assert all("time_us" in row.figures for row in rows)
    assert all("faster_than_zeropg" in row.figures for row in rows if row.peer == "zeropg_arena")
    assert program.main(["bench", "table", "--folder", str(tmp_path)]) == 0
    assert "all_reduce of 8 bytes, 2 rank(s) beside 1 busy processes: " in capsys.readouterr().out


def test_open_mpi_is_a_peer_whose_mpirun_starts_the_ranks(tmp_path):
    pytest.importorskip("mpi4py", reason="requirements/bench.txt is not installed")
    file = tmp_path / "out.json"
    shape = ["-b", "64", "-e", "4K", "-f", "64", "--op", "all", "-d", "float,bfloat16"]
    peers = ["--peers", "zeropg,openmpi"]
    assert program.main(["bench", "collectives", *shape, *peers, *QUICK, "--output", str(file)]) == 0
    header, rows = read_results(file)
    assert "Open MPI" in header["openmpi"]
    theirs = {(row.case, row.parameters["dtype"]) for row in rows if row.peer == "openmpi"}
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive"} <= {
        case for case, _ in theirs
    }
    assert ("all_reduce", "bfloat16") not in theirs


def test_files_name_the_environment_but_no_secret(monkeypatch):
    monkeypatch.setenv("ZEROPG_SECRET", "hush")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "UCX_TLS=tcp" in collectives._environment()
    assert not any("SECRET" in entry for entry in collectives._environment())


def test_a_wrong_result_has_a_row_without_a_time():
    row = {"experiment_name": "all_reduce", "type": "float", "redop": "sum", "size": 8, "in_place": None}
    figures = {"p50_us": 2.0, "p99_us": 3.0, "round_medians_us": [2.0], "percent_of_bound": 5.0}
    figures |= {"percent_of_staged_bound": 9.0, "times_copy": 4.0}
    timed = row | {"out_of_place": {"nwrong": 0, "bus_bw": 1.0}, "out_of_place_per_iter": figures}
    wrong = row | {"out_of_place": {"nwrong": 3, "bus_bw": 0.0}}
    rows = collectives._rows({"zeropg": [wrong], "gloo": [timed]}, may_claim=True)
    assert rows[0].figures == {"wrong_elements": 3}
    assert not [name for name in rows[1].figures if name.startswith("faster_than")]


def test_a_busy_machine_files_no_ratio():
    milliseconds = {f"{peer} {stage}": [1.0, 2.0] for peer in groups.BACKENDS for stage in groups.STAGES}
    assert all("faster_than_gloo" in row.figures for row in groups._rows(milliseconds, may_claim=True))
    assert all(set(row.figures) == {"time_ms"} for row in groups._rows(milliseconds, may_claim=False))


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

    def rows(peer: str, times: dict[int, float], dtype: str = "float", **more: float) -> list[Row]:
        figures = {"p99_us": 2.0, "percent_of_bound": 90.0, "times_copy": 1.25} | more
        point = {"dtype": dtype, "redop": "sum", "place": "in_place"}
        return [
            Row("all_reduce", peer, {"time_us": us} | figures, point | {"bytes": size}) for size, us in times.items()
        ]

    ours = [
        *rows("zeropg", {1024: 1.0}, faster_than_gloo=10.0),
        *rows("zeropg", {65536: 2.0}, faster_than_gloo=20.0),
        *rows("zeropg", {64 << 20: 100.0}, faster_than_gloo=2.5),
    ]
    theirs = rows("gloo", {1024: 10.0, 65536: 40.0, 64 << 20: 250.0})
    header = {"busy": False, "ranks": 2, "beside": 0}
    write_results(tmp_path / "collectives_2_ranks.json", "collectives", ours + theirs, header)
    write_results(tmp_path / "latency_1_rank.json", "collectives", ours + theirs, header)
    halves = rows("zeropg", {1024: 2.0}, "bfloat16", faster_than_float=0.5)
    write_results(tmp_path / "dtypes_2_ranks.json", "collectives", ours + halves, header | {"busy": True})
    group = Row("first", "zeropg", {"time_ms": Spread(32.0, 30.0, 40.0)})
    write_results(tmp_path / "groups_16_ranks.json", "groups", [group], {"busy": False, "ranks": 16})
    assert program.main(["bench", "table", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "| 2 | all_reduce | ordinary | 10.0-20.0 |  | 2.5-2.5 | 90 | 1.25 | 3 of 3 sizes |" in said
    assert "0.50-0.50 of float's rate in bytes" in said
    assert "all_reduce of 1024 bytes, 2 rank(s): 1.0 us (p99 2.0), gloo 10.0 us." in said
    assert "zeropg first group of 16 ranks: 32.0 ms, 2.00 ms per rank." in said
    assert "proving nothing: dtypes_2_ranks." in said


def test_making_groups_is_timed(forked_ranks, tmp_path):
    file = tmp_path / "groups.json"
    few = ["-n", "3", "--rounds", "2", "--warm-up", "0", "--even-if-busy"]
    assert program.main(["bench", "groups", *few, "--output", str(file)]) == 0
    _, rows = read_results(file)
    assert {(row.peer, row.case) for row in rows} == {
        (peer, stage) for peer in ("zeropg", "gloo") for stage in ("first", "further")
    }
    for row in rows:
        spread = row.figures["time_ms"]
        assert 0 < spread.low <= spread.median <= spread.high
        assert row.peer != "gloo" or row.median("faster_than_gloo") == 1.0


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


def test_train_measures_an_implementation_beside_the_baseline(forked_ranks, tmp_path):
    file = tmp_path / "train.json"
    small = ["--rounds", "1", "--steps", "2", "--warm-up", "1", "--layers", "2", "--width", "64"]
    chosen = ["--only", "zeropg stage 3", "--even-if-busy"]
    assert program.main(["bench", "train", *small, *chosen, "--output", str(file)]) == 0
    _, (baseline, ours) = read_results(file)
    assert (baseline.peer, ours.peer) == ("ddp gloo", "zeropg stage 3")
    assert baseline.median("step_over_ddp") == 1.0
    assert ours.median("step_ms") > 0 and ours.median("memory_bytes_per_parameter") > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "2", "-n", "3"], "--hosts 2 with --ranks 3: expected a divisor"),
        (["--link", "1gbit"], "give --hosts 2"),
    ],
)
def test_train_refuses_hosts_that_do_not_fit(options, words, capsys):
    with pytest.raises(SystemExit):
        program.main(["bench", "train", *options])
    assert words in capsys.readouterr().err


def test_load_measures_beside_plain_reads(forked_ranks, tmp_path):
    file = tmp_path / "load.json"
    arguments = ["--bytes", "64M", "--rounds", "1", "--path", str(tmp_path), "--even-if-busy", "--output", str(file)]
    assert program.main(["bench", "load", *arguments]) == 0
    rows = {row.peer: row for row in read_results(file)[1]}
    assert list(rows) == ["plain read", "load_pretrained", "load_checkpoint", "FSDP2 from rank 0"]
    for name in ("plain read", "load_pretrained", "load_checkpoint"):
        # A checkpoint is read in whole chunks of 1 MiB, for their checksums: 9 for a part of 8 MiB that begins in one.
        assert 0.99 < rows[name].median("read_weights") < 1.15
        assert rows[name].median("above_shard_mib") < 64
    assert [path.name for path in tmp_path.iterdir()] == ["load.json"]


def test_the_script_beside_deepspeed_trains_by_the_changed_line(tmp_path):
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    shape = {"layers": 1, "width": 64, "context": 16, "steps": 2, "warm_up": 1}
    for case in (Case.parse("0"), Case.parse("3x2:fp16")):
        job.write_text(json.dumps(shape | {"config": case.config(micro_batch=1)}))
        run_ranks(2, script.main, "zeropg.deepspeed", str(job), str(result), backend=None, env=AGENT_STORE)
        found = json.loads(result.read_text())
        assert found["losses"][-1] < found["losses"][0] and len(found["losses"]) == 3
        assert found["loss_scales"] == ([65536.0] * 3 if case.dtype == "fp16" else [1.0] * 3)
        assert 0 < found["memory_bytes"] < found["process_bytes"]


def test_figures_beside_deepspeed_want_the_same_losses():
    case = Case.parse("2x4:fp16")
    assert (case.stage, case.micro_batches, str(case)) == (2, 4, "stage 2, fp16, 4 micro-batches")
    right = {"losses": [5.0, 4.0], "loss_scales": [2.0, 1.0]}
    assert not disagreement(case, {"deepspeed": [right], "zeropg": [right]})
    scales = disagreement(case, {"deepspeed": [right], "zeropg": [right, right | {"loss_scales": [2.0, 2.0]}]})
    assert scales == "loss scales of zeropg are [2.0, 2.0], expected [2.0, 1.0]"
    apart = disagreement(Case.parse("1"), {"deepspeed": [right], "zeropg": [right | {"losses": [5.0, 4.0001]}]})
    assert "losses of zeropg differ by 2.5e-05" in apart


def test_deepspeed_must_be_there_to_stand_beside(capsys):
    assert program.main(["bench", "deepspeed", "--python", "/no/such/python"]) == 2
    assert "/no/such/python cannot import deepspeed and zeropg" in capsys.readouterr().err


def test_optimizer_steps_agree_and_are_timed(tmp_path):
    file = tmp_path / "optimizer.json"
    for name in ("adamw", "sgd"):
        small = ["--optimizer", name, "--numel", "20K", "--rounds", "2", "--even-if-busy", "--output", str(file)]
        assert program.main(["bench", "optimizer", *small]) == 0
        _, rows = read_results(file)
        peers = ("zeropg fused", "torch fused", "torch foreach", "torch for-loop")
        dtypes = ("float32", "bfloat16")
        assert [(row.case, row.parameters["dtype"], row.peer) for row in rows] == [
            (name, dtype, peer) for dtype in dtypes for peer in peers
        ]
        assert all(row.median("time_over_zeropg") == 1.0 for row in rows if row.peer == "zeropg fused")


def test_an_optimizer_that_computes_something_else_is_not_timed(monkeypatch, capsys):
    from zeropg.tools.bench import optimizer

    real = optimizer._theirs
    monkeypatch.setattr(optimizer, "_theirs", lambda name, start, *rest: real(name, start + 1e-3, *rest))
    assert program.main(["bench", "optimizer", "--numel", "1K", "--even-if-busy"]) == harness.WRONG
    assert "differs from torch's plain loop" in capsys.readouterr().err


def test_codecs_are_checked_and_timed(tmp_path):
    file = tmp_path / "compression.json"
    assert program.main(["bench", "compression", "--bytes", "64K,128K", "--even-if-busy", "--output", str(file)]) == 0
    _, rows = read_results(file)
    ours = {row.case: row for row in rows if row.peer == "zeropg"}
    assert set(ours) == set(codecs()) > set(named_codecs())
    assert {row.parameters["bytes"] for row in rows if row.peer == "copy"} == {64 << 10, 128 << 10}
    assert {row.case for row in rows if row.peer == "torch"} == {"int8", "int4", "top_k"}
    assert ours["int8"].median("percent_of_fp32") == pytest.approx(25.2, abs=0.1)
    assert ours["int4"].median("percent_of_fp32") == pytest.approx(12.7, abs=0.1)
    assert 0 < ours["int8"].median("relative_l2_error") < ours["int4"].median("relative_l2_error") < 0.2


def test_a_tier_is_checked_and_timed(tmp_path):
    file = tmp_path / "offload.json"
    small = ["--path", str(tmp_path), "--bytes", "1M", "--numel", "100K", "--rounds", "2", "--even-if-busy"]
    assert program.main(["bench", "offload", *small, "--output", str(file)]) == 0
    _, rows = read_results(file)
    assert [row.case for row in rows] == ["write", "read", "write", "read", "step", "step"]
    assert all(row.median("time_ms" if row.case == "step" else "gbps") > 0 for row in rows)


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
        (["bench", "deepspeed", "--case", "4"], "'4' is no list of STAGE[xMICRO_BATCHES][:DTYPE]"),
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


def test_results_come_back_as_they_were_written(tmp_path: Path):
    file = tmp_path / "x.json"
    figures = {"time_us": Spread(12.3456, 1e-9, 2e6), "wire_bytes": 3.0}
    rows = [Row("all_reduce", "zeropg", figures, {"bytes": 8}), Row("step", "ddp gloo", {"loss": 0.000123456789})]
    write_results(file, "suite", rows, {"busy": False, "load_average": [0.5]})
    header, read = read_results(file)
    assert header == {"suite": "suite", "busy": False, "load_average": [0.5]}
    assert read[0] == Row(
        "all_reduce", "zeropg", {"time_us": Spread(12.3456, 1e-9, 2e6), "wire_bytes": 3}, {"bytes": 8}
    )
    assert read[1].median("loss") == 0.000123457
    assert len([line for line in file.read_text().splitlines() if '"case"' in line]) == 2  # a row is a line


@pytest.mark.parametrize("content", ["", "[]", '{"table": {}}', '{"header": {}, "rows": [{"case": "x"}]}'])
def test_a_file_of_another_form_is_named(tmp_path, capsys, content):
    (tmp_path / "other.json").write_text(content)
    assert program.main(["bench", "table", "--folder", str(tmp_path)]) == 2
    assert "other.json: no file of a benchmark suite" in capsys.readouterr().err


def test_published_files_are_small_and_give_the_published_table(capsys):
    """Raw rounds stay out of git."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(sizes.values()) < 1_000_000
    assert not [name for name, size in sizes.items() if name.endswith(".svg") and size >= 100_000]
    assert program.main(["bench", "table", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == (folder / "table.md").read_text()
