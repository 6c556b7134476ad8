"""`bench loss` on simulated hosts, small."""

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
