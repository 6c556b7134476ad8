"""`python -m zeropg run` over hosts: a shell that enters simulated ones stands in for ssh."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import kill_with_children, run_program
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]

SHELL = """#!/bin/sh
printf 'A greeting without an end. '
case "$1" in
{cases}
*) echo "rsh: Could not resolve hostname $1" >&2; exit 255 ;;
esac
"""


def command(lab: Lab, folder: Path, hostfile: str, *options: str) -> list[str]:
    """The command line that runs folder/script.py on hosts of `lab`."""
    cases = [
        f"{host.name}) exec {shlex.join(host.enter())} env {shlex.join(f'{k}={v}' for k, v in host.identity().items())}"
        ' sh -c "$2" ;;'
        for host in lab.hosts
    ]
    shell = folder / "rsh"
    shell.write_text(SHELL.format(cases="\n".join(cases)))
    shell.chmod(0o755)
    (folder / "hosts").write_text(hostfile)
    where = ["--hostfile", str(folder / "hosts"), "--rsh", str(shell)]
    return [sys.executable, "-m", "zeropg", "run", *where, *options, str(folder / "script.py")]


def beats(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in folder.glob("beat*")}


def assert_all_are_silent(folder: Path, count: int) -> None:
    """No rank of BEATING lives."""
    before = beats(folder)
    time.sleep(1)
    assert len(before) == count and beats(folder) == before


ADDING = """
import os, socket, sys, torch, torch.distributed as dist
import zeropg
dist.init_process_group("zeropg")
tensor = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(tensor)
print(socket.gethostname(), os.environ["LOCAL_RANK"], tensor.item(), len(zeropg.topology().nodes), os.environ["A"])
dist.destroy_process_group()
"""


def test_ranks_of_a_hostfile_meet(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ADDING)
    (tmp_path / "variables").write_text("A=for all\n")
    options = ["--exclude", "host1:0", "--log_dir", str(tmp_path / "logs")]
    options += ["--environment_file", str(tmp_path / "variables")]
    line = command(lab, tmp_path, "host0 slots=2\nhost1 slots=2\n", *options)
    # Of the launcher alone: a host has its own.
    done = run_program(line, timeout=300, env=os.environ | {"ZEROPG_HOST_ID": "launcher", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "exit barrier" not in done.stderr, done.stdout + done.stderr
    expected = ["host0 0 6.0 2 for all", "host0 1 6.0 2 for all", "host1 0 6.0 2 for all"]
    # torch warns, on some ranks, of names that it does not find.
    assert sorted(line for line in done.stdout.splitlines() if "host" in line.split()[2]) == [
        f"[rank {rank}] {line}" for rank, line in enumerate(expected)
    ]
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(3)]
    assert all(line in log for line, log in zip(expected, logs, strict=True))


BEATING = """
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(__file__).parent
print("rank", rank, "is here", flush=True)
while len(list(folder.glob("beat*"))) < 3 or rank != os.environ.get("FAILS"):
    (folder / f"beat{rank}").touch()
    time.sleep(0.05)
sys.stderr.write("this rank gives up\\n")
os.abort()
"""


def test_the_rank_that_fails_first_is_named_with_its_host_and_nothing_lives_on(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BEATING)
    (tmp_path / "variables").write_text("FAILS=2\n")
    variables = ["--environment_file", str(tmp_path / "variables")]
    line = command(lab, tmp_path, "host0 slots=2\nhost1 slots=1\n", *variables)
    done = run_program(line, timeout=300)
    assert done.returncode == 1
    assert "zeropg run: rank 2 on host1 failed first: killed by SIGABRT; all ranks are stopped" in done.stderr
    assert done.stderr.index("--- last lines of rank 2:\n") < done.stderr.rindex("this rank gives up")
    assert_all_are_silent(tmp_path, 3)


def test_a_host_that_cannot_be_reached_is_one_sentence_before_anything_starts(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BEATING)
    done = run_program(command(lab, tmp_path, "host0 slots=2\nhost9 slots=1\n"), timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    shell = tmp_path / "rsh"
    assert done.stderr.strip().splitlines() == [
        f"zeropg run: host9 cannot be reached: {shell} ended with 255 and said: rsh: Could not resolve hostname host9; "
        "nothing is started"
    ]
    assert not beats(tmp_path)


@contextmanager
def running(lab: Lab, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Three ranks that beat, on two hosts."""
    (folder / "script.py").write_text(BEATING)
    line = command(lab, folder, "host0 slots=2\nhost1 slots=1\n")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            deadline = time.monotonic() + 300
            while len(beats(folder)) < 3:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        except BaseException:
            kill_with_children(process.pid)
            raise


def test_ranks_end_with_a_launcher_that_is_killed(lab: Lab, tmp_path: Path) -> None:
    with running(lab, tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(5)
    assert_all_are_silent(tmp_path, 3)


def test_a_host_that_is_lost_ends_the_run(needs_lab: None, tmp_path: Path) -> None:
    with Lab(hosts=2) as lab, running(lab, tmp_path) as process:
        lab.kill(1)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "host1 failed first: the connection is gone" in said, said
        assert_all_are_silent(tmp_path, 3)
