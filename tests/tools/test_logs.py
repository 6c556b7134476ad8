"""`python -m zeropg logs`: what it shows of a real run, and of files that the test makes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import run_program
from zeropg.tools.logs.command import main
from zeropg.tools.logs.files import Line, RankFile, format_ranks, parse_ranks
from zeropg.tools.logs.merge import SIGHT, merge
from zeropg.tools.run.record import RankFailure, Record, read_record, write_record

TRACEBACK = "Traceback (most recent call last):\n  File\nValueError: no\n"
LOGS = [sys.executable, "-m", "zeropg", "logs"]


def written(folder: Path, *texts: str) -> Path:
    """A folder of the logs of ranks 0, 1 ..."""
    folder.mkdir(exist_ok=True)
    for rank, text in enumerate(texts):
        (folder / f"rank{rank}.log").write_text(text)
    return folder


def merged(*texts: str) -> list[str]:
    """Of texts of words, each word a line."""
    lines = [text.split() for text in texts]
    streams = [
        (rank, iter([Line(word, at + 1, (at + 1) / len(words)) for at, word in enumerate(words)]))
        for rank, words in enumerate(lines)
    ]
    return [f"{format_ranks(ranks)}:{line}" for ranks, line in merge(streams)]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


# --- One text of several ---


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("a b", "a b", "a b"), ["0-2:a", "0-2:b"]),
        (("a x b", "a y b"), ["0-1:a", "0:x", "1:y", "0-1:b"]),
        (("a b", "b", "a b"), ["0,2:a", "0-2:b"]),
        (("a", "a", "b", "a"), ["0-1,3:a", "2:b"]),
        (("s1 p s2 p", "s1 q s2 q"), ["0-1:s1", "0:p", "1:q", "0-1:s2", "0:p", "1:q"]),
        (("x a b x", "a b x"), ["0:x", "0-1:a", "0-1:b", "0-1:x"]),
        (("p1 p2 p3", "q1 q2 q3"), ["0:p1", "1:q1", "0:p2", "1:q2", "0:p3", "1:q3"]),
        (("x p1 p2 y", "x q1 y"), ["0-1:x", "0:p1", "1:q1", "0:p2", "0-1:y"]),
        (("", "a"), ["1:a"]),
        ((), []),
    ],
)
def test_lines_that_ranks_have_in_common_are_one(texts: tuple[str, ...], expected: list[str]) -> None:
    assert merged(*texts) == expected


def test_every_rank_keeps_all_its_lines_in_their_order() -> None:
    chance = random.Random(1)
    texts = [[chance.choice("abcdefgh") for _ in range(3 * SIGHT)] for _ in range(4)]
    streams = [(rank, iter([Line(word, 0, 0.0) for word in words])) for rank, words in enumerate(texts)]
    own: list[list[str]] = [[] for _ in texts]
    for ranks, line in merge(streams):
        for rank in ranks:
            own[rank].append(line)
    assert own == texts


def test_equal_lines_out_of_sight_are_shown_apart() -> None:
    lines = [f"x{at}" for at in range(2 * SIGHT)]
    assert merged(" ".join([*lines[: SIGHT - 1], "a"]), "a")[-1] == "0-1:a"
    assert merged(" ".join([*lines, "a"]), "a")[-1] == "0:a"


def test_ranks_with_nothing_in_common_go_through_their_logs_at_one_pace() -> None:
    shown = merged(" ".join(f"p{at}" for at in range(10_000)), " ".join(f"q{at}" for at in range(1000)))
    assert 9_900 < shown.index("1:q900") < 10_000


def test_tracebacks_stay_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "logs", f"start\na\nb\n{TRACEBACK}", "start\nc\nd\n[rank1]: Traceback:\n[rank1]:   F\n")
    expected = ["[0-1] start", "[0] a", "[1] c", "[0] b", "[1] d"]
    expected += [f"[0] {line}" for line in TRACEBACK.splitlines()]
    assert shown(capsys, logs) == [*expected, "[1] [rank1]: Traceback:", "[1] [rank1]:   F"]


def test_numbers_of_ranks_are_read_and_written() -> None:
    assert parse_ranks("0,2-3, 7") == {0, 2, 3, 7}
    assert format_ranks([0, 2, 3, 4, 7, 8]) == "0,2-4,7-8"


# --- What is shown of a folder ---


def test_a_folder_is_one_text_with_ranks_in_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "logs", "epoch 1\nloss 1.2\n", "epoch 1\nloss 1.3\nlast words", "epoch 1\n")
    (logs / "notes.txt").write_text("nothing of a rank's\n")
    expected = ["[0-2] epoch 1", "[0] loss 1.2", "[1] loss 1.3", "[1] last words"]
    assert shown(capsys, logs) == expected
    assert shown(capsys, logs, "--rank", "0,2") == ["[0,2] epoch 1", "[0] loss 1.2"]
    assert shown(capsys, logs, "--grep", r"loss \d\.3|epoch") == ["[0-2] epoch 1", "[1] loss 1.3"]
    assert shown(capsys, logs, "--tail", "1") == ["[0] loss 1.2", "[1] last words", "[2] epoch 1"]
    assert shown(capsys, logs, "--tail", "1", "--grep", "loss") == ["[0] loss 1.2", "[1] loss 1.3"]
    assert shown(capsys, logs, "--tail", "0") == []


def test_ranks_are_ordered_by_number_and_left_over_files_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = written(tmp_path / "logs", *[f"rank {rank}\n" for rank in range(12)])
    assert shown(capsys, logs) == [f"[{rank}] rank {rank}" for rank in range(12)]
    write_record(logs, Record(["a", "b"], failures=[]))
    assert shown(capsys, logs) == ["[0] rank 0", "[1] rank 1"]


def test_bytes_bars_and_long_lines_are_shown_as_a_terminal_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = written(tmp_path / "logs")
    (logs / "rank0.log").write_bytes(b"\xff\xfe bad\n 10%\r 20%\r\nwindows\r\n" + b"x" * 100_000 + b"\nend\n")
    lines = shown(capsys, logs)
    assert lines[:3] == ["[0] \ufffd\ufffd bad", "[0]  20%", "[0] windows"]
    assert [len(line) for line in lines[3:]] == [4 + (1 << 16), 4 + 100_000 - (1 << 16), 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["empty"], "empty has no logs (rank0.log ...)"),
        (["logs", "--rank", "0,5-6"], "logs has no log of rank 5-6; it has those of 0-1"),
        (["logs", "--rank", "3-1"], "'3-1' names no ranks; expected numbers and ranges, such as 0,2-3"),
        (["logs", "--rank", ""], "'' names no ranks"),
        (["logs", "--grep", "("], "'(' is no regular expression: missing ), unterminated subpattern"),
        (["logs", "--tail", "-1"], "'-1' is no number of lines"),
        (["logs", "--failure", "--rank", "0"], "--failure looks at all ranks and lines"),
        (["logs", "--failure", "--follow"], "not allowed with argument"),
        (["broken"], "run.json is no record of a run"),
        (["unreadable"], "rank0.log"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "logs", "a\n", "b\n")
    (tmp_path / "empty").mkdir()
    (written(tmp_path / "broken", "a\n") / "run.json").write_text("[1]")
    (tmp_path / "unreadable" / "rank0.log").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1], captured.err
    assert not captured.out


def test_a_reader_who_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    logs = written(tmp_path / "logs", "".join(f"line {at}\n" for at in range(100_000)))
    with subprocess.Popen([*LOGS, str(logs)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "[0] line 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


# --- What is still being written ---


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_follow_shows_what_comes_also_of_new_ranks_until_ctrl_c(tmp_path: Path) -> None:
    logs, output = written(tmp_path / "logs", "before\nlast\n"), tmp_path / "output"
    command = [*LOGS, str(logs), "--follow", "--tail", "1"]
    # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        signal.signal(signal.SIGINT, before)

        def said(text: str) -> None:
            until(lambda: text in output.read_text() or process.poll() is not None)
            assert process.poll() is None, output.read_text()

        said("[0] last\n")
        with (logs / "rank0.log").open("a") as log:
            log.write("more\nbegun, ")
        (logs / "rank1.log").write_text("a new rank\n")
        said("[0] more\n")
        said("[1] a new rank\n")
        with (logs / "rank0.log").open("a") as log:
            log.write("and ended\n")
        said("[0] begun, and ended\n")
        (logs / "rank0.log").write_text("anew\n")
        said("[0] anew\n")
        with (logs / "rank1.log").open("a") as log:
            log.write("no end")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    text = output.read_text()
    assert "before" not in text and "Traceback" not in text
    assert text.endswith("[1] no end\n")


def test_a_line_without_an_end_waits_for_it(tmp_path: Path) -> None:
    path = written(tmp_path / "logs", "whole\nhal") / "rank0.log"
    file = RankFile(0, path)
    assert [line.text for line in file.lines(is_final=False)] == ["whole"]
    path.write_text("whole\nhalf\n")
    assert [(line.text, line.number) for line in file.lines(is_final=False)] == [("half", 2)]
    assert not list(file.lines(is_final=True))


# --- Who failed first ---

FAILING = """
import os, time
rank = os.environ["RANK"]
print("both ranks say this", flush=True)
print("rank", rank, "alone", flush=True)
if rank == "1":
    time.sleep(1)  # standard error is another stream than what was printed
    raise ValueError("what went wrong")
time.sleep(600)
"""


def test_of_a_real_run_the_rank_that_failed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    logs = tmp_path / "logs"
    script = str(tmp_path / "script.py")
    run = [sys.executable, "-m", "zeropg", "run", "--num_gpus", "2", "--log_dir", str(logs), script]
    assert run_program(run, timeout=300).returncode == 1
    record = read_record(logs)
    assert record is not None and record.hosts == ["localhost", "localhost"]
    lines = shown(capsys, logs)
    assert lines[:3] == ["[0-1] both ranks say this", "[0] rank 0 alone", "[1] rank 1 alone"]
    assert main([str(logs), "--failure"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "rank 1 on localhost failed first: exit code 1"
    assert any(f"{logs / 'rank1.log'}:" in line and "Traceback (most recent call last):" in line for line in said)
    assert any("ValueError: what went wrong" in line for line in said[said.index("--- last lines of rank 1:") :])


def failure(capsys: pytest.CaptureFixture[str], logs: Path, *options: str) -> tuple[int, list[str]]:
    status = main([str(logs), "--failure", *options])
    return status, capsys.readouterr().out.splitlines()


def test_without_a_record_it_is_the_log_that_ended_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "logs", f"a\n{TRACEBACK}", f"b\nc\n[rank1]: {TRACEBACK}", "d\n")
    for rank, seconds in enumerate((20, 10, 5)):
        os.utime(logs / f"rank{rank}.log", (seconds, seconds))
    assert failure(capsys, logs, "--tail", "1") == (
        1,
        [
            "rank 1 failed first, as its log was the first to end",
            f"  also rank 0: {logs}/rank0.log:2: Traceback (most recent call last):",
            f"  {logs}/rank1.log:3: [rank1]: Traceback (most recent call last):",
            "--- last lines of rank 1:",
            "ValueError: no",
            "---",
        ],
    )
    write_record(logs, Record(["here", "there", "there"]))
    assert failure(capsys, logs)[1][0] == "rank 1 on there failed first, as its log was the first to end"


@pytest.mark.parametrize(
    "line",
    [
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'c10::Error'",
        "*** Process received SIGABRT",
        "[host:1:0] Caught signal 11 (Segmentation fault: address not mapped)",
    ],
)
def test_a_fatal_signal_is_a_failure(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = failure(capsys, written(tmp_path / "logs", f"a\n{line}\n"))
    assert (status, said[1]) == (1, f"  {tmp_path}/logs/rank0.log:2: {line}")


def test_the_record_has_the_last_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "logs", f"a\n{TRACEBACK}", "")
    hosts = ["h0", "h1"]
    write_record(logs, Record(hosts, [RankFailure(1, "h1", "killed by SIGKILL"), RankFailure(0, "h0", "exit code 1")]))
    expected = ["rank 1 on h1 failed first: killed by SIGKILL", "  then rank 0 on h0: exit code 1"]
    assert failure(capsys, logs) == (1, [*expected, f"  {logs}/rank1.log is empty"])
    write_record(logs, Record(hosts, [RankFailure(None, "h1", "lost")]))
    assert failure(capsys, logs) == (1, ["h1 failed first: lost"])
    write_record(logs, Record(hosts, [], "SIGINT"))
    assert failure(capsys, logs) == (0, ["no rank failed: the run was stopped by SIGINT"])
    write_record(logs, Record(hosts, []))
    caught = f"  rank 0 went on after {logs}/rank0.log:2: Traceback (most recent call last):"
    assert failure(capsys, logs) == (0, ["no rank failed: the run ended well", caught])


def test_a_run_without_failures_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "logs", "a\n", "b\n")
    assert failure(capsys, logs) == (0, ["no rank wrote a traceback or a fatal signal"])
