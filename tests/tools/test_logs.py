"""`python -m zeropg logs`, over what real runs wrote and over texts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import kill_with_children, run_program
from zeropg.tools.logs import command
from zeropg.tools.logs.merge import Line, merged, shown_ranks

MAIN = [sys.executable, "-m", "zeropg"]


def folder(path: Path, *texts: str) -> Path:
    """Rank r's log says texts[r]; later ranks' logs are older."""
    for rank, text in enumerate(texts):
        log = path / f"rank{rank}.log"
        log.write_text(text)
        os.utime(log, (1000 - rank, 1000 - rank))
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert command.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_shared_lines_come_once_and_order_the_others() -> None:
    logs = {
        0: ["start", "step 1", "loss 3", "step 2", "end"],
        1: ["start", "warm", "step 1", "loss 4", "step 2"],
        3: ["start", "step 1", "loss 3", "step 2", "end"],
    }
    expected = [
        ((0, 1, 3), "start"),
        ((1,), "warm"),
        ((0, 1, 3), "step 1"),
        ((0, 3), "loss 3"),
        ((1,), "loss 4"),
        ((0, 1, 3), "step 2"),
        ((0, 3), "end"),
    ]
    assert list(merged(logs)) == [Line(*line) for line in expected]


@pytest.mark.parametrize("window", [1, 2, 1000])
def test_each_line_of_each_rank_is_there_once_in_its_order(window: int) -> None:
    logs = {0: ["a", "b", "a", "", "c"] * 3, 1: ["b", "a", "", "", "d"] * 3, 2: [], 5: ["c", "d", "a"]}
    lines = list(merged(logs, window))
    for rank, said in logs.items():
        assert [line.text for line in lines if rank in line.ranks] == said


def test_ranks_are_shown_as_spans() -> None:
    assert [shown_ranks(ranks) for ranks in ([0], [0, 1, 2, 3], [0, 2, 3, 7])] == ["0", "0-3", "0,2-3,7"]


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    load(2)
ValueError: no {0}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    step()
RuntimeError: rank {0} stops
"""


def test_options_choose_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = folder(tmp_path, "hello\nbar 1%\rbar 100%\nx 0\n", "hello\nx 1\nbye", "hello\nx 2\n")
    assert shown(capsys, logs) == [
        "[0-2] hello",
        "[0]   bar 100%",
        "[0]   x 0",
        "[1]   x 1",
        "[1]   bye",
        "[2]   x 2",
    ]
    assert shown(capsys, logs, "--rank", "1-2", "--grep", r"x \d") == ["[1]   x 1", "[2]   x 2"]
    assert shown(capsys, logs, "--tail", "2") == ["[1]   bye", "[2]   x 2"]


def test_the_rank_whose_log_ended_first_failed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefixed = "".join(f"[rank1]: {line}\n" for line in TRACEBACK.format(1).splitlines())
    logs = folder(tmp_path, "hello\n" + TRACEBACK.format(0), "hello\n" + prefixed + "bye\n", "hello\n")
    expected = [f"rank 1 failed first ({tmp_path / 'rank1.log'}):"]
    expected += [f"  {line}" for line in TRACEBACK.format(1).splitlines()]
    assert shown(capsys, logs, "--failure") == expected
    assert shown(capsys, logs)[-len(expected) :] == expected
    assert shown(capsys, logs, "--failure", "--rank", "0,2")[0].startswith("rank 0 failed first")
    assert "failed first" not in "\n".join(shown(capsys, logs, "--grep", "hello"))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere"], 1, "nowhere is no directory; expected what --log_dir"),
        (["empty"], 1, "empty has no rank0.log"),
        (["logs", "--rank", "0,3"], 1, "no log of rank 3, only of 0, 1"),
        (["logs", "--failure"], 1, "no traceback of rank 0-1; a rank that was killed leaves none"),
        (["logs", "--rank", "x"], 2, "--rank is 'x'; expected ranks like 0,2"),
        (["logs", "--grep", "("], 2, "--grep is '(', no regular expression"),
        (["logs", "--tail", "0"], 2, "--tail is 0, expected at least 1"),
        (["logs", "--failure", "--follow"], 2, "--failure goes with --rank only"),
    ],
)
def test_what_cannot_be_shown_is_said(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("logs").mkdir()
    folder(Path("logs"), "a\n", "b\n")
    try:
        found = command.main(arguments)
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status and message in capsys.readouterr().err


SCRIPT = """
import os, time
print("hello", flush=True)
rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(1)
    raise ValueError("a bad batch")
time.sleep(600)
"""


def test_a_real_run_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [*MAIN, "run", "--num_gpus", "2", "--log_dir", str(tmp_path / "logs"), str(script)]
    assert run_program(run, timeout=300).returncode == 1
    said = run_program([*MAIN, "logs", str(tmp_path / "logs")], timeout=100)
    assert said.returncode == 0 and "[0-1] hello" in said.stdout, said.stdout + said.stderr
    assert "rank 1 failed first" in said.stdout and "  ValueError: a bad batch" in said.stdout


def test_follow_shows_what_comes_until_ctrl_c(tmp_path: Path) -> None:
    folder(tmp_path, "one\ntwo\n", "one\ntwo\n")
    line = [*MAIN, "logs", str(tmp_path), "--follow", "--tail", "1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "[0-1] two\n"
            with (tmp_path / "rank1.log").open("a") as log:
                log.write("half")
                log.flush()
                time.sleep(1)
                log.write(" and half\n")
            assert process.stdout.readline() == "[1]   half and half\n"
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
        except BaseException:
            kill_with_children(process.pid)
            raise
    assert (process.returncode, rest, errors) == (0, "", "")
