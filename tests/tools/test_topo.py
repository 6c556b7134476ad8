"""`python -m zeropg topo`, alone and on ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.processes import run_program
from tests.spawn import run_ranks
from zeropg.tools.topo import measure

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    command = [sys.executable, "-m", *torchrun, "zeropg", "topo", *arguments]
    return run_program(command, timeout=120, env=ENVIRONMENT)


def test_alone_it_shows_this_machine():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["world_size"] == 1 and answer["nodes"][0]["ranks"] == [0] and answer["links"] == []


def test_under_torchrun_it_shows_the_group_and_its_links():
    done = run("--measure", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "us, 8 bytes one way" in done.stdout and "2 ranks" in done.stdout


def test_every_pair_is_measured_and_all_ranks_agree():
    first, *others = run_ranks(3, measure, timeout=60)
    assert set(first) == {(0, 1), (0, 2), (1, 2)} and all(other == first for other in others)
    assert all(link["latency_us"] > 0 and link["gbps"] > 0 for link in first.values())
