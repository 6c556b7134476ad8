"""`bench nodes` on simulated hosts, small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zeropg.tools.bench.results import Spread, read_results

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]


@pytest.mark.soak
def test_collectives_take_turns_and_a_link_changes_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "nodes.json"
    arguments = ["--case", "across,drop", "--largest", "64K", "--rounds", "2", "--turn-seconds", "0.1"]
    arguments += ["--operations", "2", "--even-if-busy", "--output", str(output)]
    command = [sys.executable, "-m", "zeropg", "bench", "nodes", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, rows = read_results(output)
    across = [row for row in rows if row.case == "across"]
    assert [(row.parameters["operation"], row.peer) for row in across] == [
        (operation, peer) for operation in ("all_reduce", "reduce_scatter", "all_gather") for peer in ("zeropg", "gloo")
    ]
    for row in across:
        # 64 KiB at 200 Mbit/s; the streams ran at that rate, which headers made a little less.
        assert row.median("bound_ms") == pytest.approx(
            2.7 if row.parameters["operation"] == "all_reduce" else 1.4, rel=0.1
        )
        assert row.median("time_ms") > 0 and isinstance(row.figures["percent_of_bound"], Spread)
        assert ("faster_than_gloo" in row.figures) == (row.peer == "zeropg")
    drop = [row for row in rows if row.case == "drop"]
    assert [row.parameters.get("number") for row in drop if row.peer == "zeropg"] == [None, 0, 1, 2, 3, 4, 5]
    assert all(row.median("dropped_over_bound") > 0 for row in drop if "number" not in row.parameters)
