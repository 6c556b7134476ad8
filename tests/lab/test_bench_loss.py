"""`bench loss` and `bench train` on simulated hosts, small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeropg.tools.bench.loss.arms import BASELINE, PLAIN
from zeropg.tools.bench.results import read_results

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]


MODES = {"end_to_end": ["--end-to-end"]}
if "ZEROPG_PROGRAM_SECONDS" in os.environ:  # make soak
    MODES["combined"] = []


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_codecs_train_over_a_slow_link(tmp_path: Path, mode: list[str]) -> None:
    output = tmp_path / "loss.json"
    arguments = ["--task", "text", "--arm", "ddp zeropg int4", "--steps", "2", "--seeds", "2", "--timed-steps", "2"]
    arguments += [*mode, "--ranks-per-host", "1", "--even-if-busy", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "zeropg", "bench", "loss", *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    header, rows = read_results(output)
    assert (header["hosts"], header["ranks"], header["end_to_end"]) == (2, 2, bool(mode))
    whole = {row.peer: row for row in rows if "step" not in row.parameters}
    assert set(whole) == {BASELINE, PLAIN["zeropg"], "ddp zeropg int4"}
    plain, encoded = whole[PLAIN["zeropg"]], whole["ddp zeropg int4"]
    assert encoded.median("step_kb") < 0.3 * plain.median("step_kb")
    assert encoded.median("encode_ms") > 0
    assert [row.parameters["step"] for row in rows if row.peer == BASELINE and "step" in row.parameters] == [1, 2]


@pytest.mark.soak
def test_a_step_between_hosts_says_what_links_carry(tmp_path: Path) -> None:
    output = tmp_path / "train.json"
    small = ["--rounds", "1", "--steps", "2", "--warm-up", "2", "--layers", "4", "--width", "128", "--even-if-busy"]
    arguments = ["-n", "4", "--hosts", "2", "--link", "1gbit", *small, "--output", str(output)]
    for name in ("fsdp2 gloo", "zeropg stage 3", "stage 3, units kept"):
        arguments += ["--only", name]
    done = subprocess.run(
        [sys.executable, "-m", "zeropg", "bench", "train", *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    header, rows = read_results(output)
    assert (header["hosts"], header["link"], len(rows)) == (2, "1gbit", 4)
    sent = {row.peer: row.median("sent_weights") for row in rows}
    # A node's link carries gradients once, and weights once or twice: half of each, with two nodes.
    assert sent["stage 3, units kept"] < 1.25 < sent["zeropg stage 3"] < 1.9 < sent["fsdp2 gloo"]
