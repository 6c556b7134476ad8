"""What measures time may fail once, and is seen to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The tests that run here hold the machine already.
CONFTEST = """
import contextlib
from tests import retries

retries.turn = lambda alone: contextlib.nullcontext()
"""
PROGRAM = """
import pytest
from pathlib import Path

HERE = Path(__file__).parent

def fail(name, times):
    tries = HERE / name
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    assert len(tries.read_text()) > times, f"{name} is slow"

@pytest.fixture
def value():
    fail("value", 1)
    return 3

@pytest.mark.alone
def test_passes(): fail("passes", 0)

@pytest.mark.alone
def test_fails_once(tmp_path): fail("once", 1)

@pytest.mark.alone
def test_whose_fixture_fails_once(value): assert value == 3

@pytest.mark.timed
def test_that_counts_seconds(): fail("seconds", 1)

@pytest.mark.alone
def test_fails_twice(): fail("twice", 2)

def test_that_measures_nothing(): fail("nothing", 1)
"""


def test_only_what_measures_time_runs_again(tmp_path: Path) -> None:
    (tmp_path / "test_times.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for tries in ([], ["--numprocesses", "2"]):
        for name in ("passes", "once", "value", "twice", "seconds", "nothing"):
            (tmp_path / name).unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "tests.retries", "-W", "ignore", "--rootdir", str(tmp_path)]
        run = subprocess.run([*command, *tries, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert "2 failed, 1 passed, 3 retried" in run.stdout, run.stdout + run.stderr
        assert "test_fails_once failed at first, and passed then" in run.stdout
        assert "once is slow" in run.stdout
        assert len((tmp_path / "nothing").read_text()) == 1
