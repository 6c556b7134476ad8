"""`python -m zeropg train`: under torchrun, as users run it; with other options and alone, in forked ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import run_forked
from tests.processes import kill_with_children, run_program

from zeropg import __main__ as program
from zeropg.tools.train.options import parse

TINY = ["--steps", "12", "--batch", "4", "--context", "64", "--layers", "2", "--width", "32", "--heads", "2"]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def launch(*arguments: str, ranks: int | None = None) -> list[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [sys.executable, "-m", *(torchrun if ranks is not None else []), "zeropg", *arguments]


def run(*arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    command = launch(*arguments, ranks=ranks)
    return run_program(command, timeout=120, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("start", "ranks", "options"),
    [
        (run, 2, ["--stage", "3"]),
        pytest.param(run_forked, None, ["--stage", "3"], marks=pytest.mark.soak),
        (run_forked, 2, ["--stage", "0", "--backend", "gloo"]),
        pytest.param(run_forked, 2, ["--stage", "1", "--param-dtype", "float32"], marks=pytest.mark.soak),
        (run_forked, 2, ["--stage", "2", "--compression", "int4"]),
    ],
    ids=["2_ranks", "alone", "stage_0_gloo", "stage_1_float32", "stage_2_int4"],
)
def test_train_learns_exports_and_reports(tmp_path, start, ranks, options):
    done = start("train", *TINY, *options, "--json", "--output", str(tmp_path), ranks=ranks)
    assert done.returncode == 0, done.stderr

    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "results.json").read_text())
    losses = [loss for _, loss in results["validation_curve"]]
    assert losses[-1] < losses[0] < 5.6  # log(256) = 5.55
    assert results["exported_loss_nats_per_byte"] == pytest.approx(losses[-1], rel=1e-2)
    assert 0 <= results["communication_share"] <= 1
    assert sum(results["memory_bytes"].values()) > 0
    report = results["compression_report"]
    assert (report is not None) == ("--compression" in options)
    if report is not None:
        assert 0 < report["encoded_bytes"] < 0.15 * report["plain_bytes"]
        assert "MB saved" in done.stderr

    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == results["parameters"]
    assert (tmp_path / "sample.txt").read_text().startswith("The ")
    for words in ("parameters in", "tokens/s", "ZeRO's formula", "plain torch.nn.Module", "a sample of its text"):
        assert words in done.stderr


def test_a_run_goes_on_from_its_checkpoint_at_another_world_size_and_stage(tmp_path):
    options = [*TINY, "--param-dtype", "float32", "--checkpoint-every", "4", "--json", "--output", str(tmp_path)]
    done = run_forked("train", *options, "--steps", "6", ranks=2)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["validation_curve"]
    assert first[-1][0] == 6
    done = run_forked("train", *options, "--resume", "--stage", "1")
    assert done.returncode == 0, done.stderr
    curve = json.loads(done.stdout)["validation_curve"]
    assert curve[: len(first)] == first and curve[-1][0] == 12
    assert curve[-1][1] < first[-1][1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "5"], "--batch 5 does not divide by 2 ranks; take 4 or 6"),
        (["--batch", "1"], "--batch 1 does not divide by 2 ranks; take 2"),
        (["--width", "30", "--heads", "4"], "--width 30 does not divide by --heads 4"),
        (["--width", "12", "--heads", "4"], "--width 12 / --heads 4 is odd; rotary positions turn pairs"),
        (["--lr", "0"], "--lr 0.0 is not positive"),
        (["--steps", "0"], "0 is not positive"),
        (["--stage", "4"], "invalid choice: 4"),
        (["--device", "cuda", "--backend", "gloo"], "--device cuda needs --backend zeropg"),
        (["--output", "/proc/nowhere"], "--output /proc/nowhere: "),
        (["--resume"], "a run with --checkpoint-every writes it"),
        (["--st", "3"], "unrecognized arguments: --st 3"),
    ],
)
def test_wrong_options_are_one_clear_error(tmp_path, capsys, options, words):
    for rank in range(2):
        with pytest.raises(SystemExit, match="2"):
            parse(["--output", str(tmp_path), *options], rank=rank, world_size=2, local_world_size=2)
    assert capsys.readouterr().err.count(words) == 1


def test_context_that_the_text_cannot_fill_is_one_clear_error(tmp_path):
    refused = run("train", "--context", "1000000", "--output", str(tmp_path))
    assert refused.returncode == 2
    assert "error: " in refused.stderr and "hold no window of context 1000000" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_ctrl_c_leaves_no_process(tmp_path):
    command = launch("train", *TINY, "--steps", "1000000", "--output", str(tmp_path), ranks=2)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as launcher:
        assert launcher.stderr is not None
        watchdog = threading.Timer(100, kill_with_children, [launcher.pid])  # only if the run hangs
        watchdog.daemon = True
        watchdog.start()
        shown = ""
        while "tokens/s" not in shown:  # the bar's first figures: training is under way
            shown += launcher.stderr.read(1)
            assert launcher.poll() is None, shown
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(ranks) == 2
        launcher.send_signal(signal.SIGINT)
        _, rest = launcher.communicate(timeout=60)
        watchdog.cancel()
    assert launcher.returncode != 0
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert "train: interrupted" in rest


def test_help_lists_the_commands_and_an_unknown_one_is_refused(capsys):
    assert program.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "train" in shown and "torchrun --standalone" in shown
    assert program.main(["nonsense"]) == 2
    assert "no command 'nonsense'; there is bench, config, doctor" in capsys.readouterr().err
