"""`python -m zeropg run` on this machine, and what it reads. Several hosts: tests/lab/test_run*.py."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from tests.processes import kill_with_children, lives, run_program
from zeropg.tools.run import command, deepspeeds_options
from zeropg.tools.run.cores import divide, parse_cpu_list
from zeropg.tools.run.environment import of_launchers, read_environment_files, to_pass, visible_gpus
from zeropg.tools.run.hosts import Host, first, read_hostfile, select
from zeropg.tools.run.job import Node
from zeropg.tools.run.launchers import LAUNCHERS, NODE, choose
from zeropg.tools.run.messages import BEAT_SECONDS, Hello, Plan, from_line, to_line
from zeropg.tools.run.node import _hello, forget, torchrun_arguments
from zeropg.tools.run.rank_output import RankOutput

RUN = [sys.executable, "-m", "zeropg", "run"]

HOSTFILE = """
# two workers
worker-0 slots=4

worker-1   slots=3   # the last GPU is broken
"""
HOSTS = [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1, 2))]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# --- What is read ---


def test_a_hostfile_is_deepspeeds(tmp_path: Path) -> None:
    assert read_hostfile(written(tmp_path / "hosts", HOSTFILE)) == HOSTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb 4\n", r"line 2: 'b 4'; expected NAME slots=N"),
        ("a slots=2\n\na slots=4\n", "line 3: a is there twice"),
        ("a slots=0\n", "N at least 1"),
        ("a slots=1 extra\n", "line 1: 'a slots=1 extra'"),
        ("me@you@a slots=1\n", "expected NAME, USER@NAME or USER@NAME:PORT"),
        ("me@-oProxyCommand=x slots=1\n", "would be an option of ssh"),
        ("-oProxyCommand=x slots=1\n", "would be an option of ssh"),
        ("# nobody\n", "names no host"),
    ],
)
def test_a_hostfile_that_is_wrong_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_hostfile(written(tmp_path / "hosts", text))


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", [(0, 1, 2, 3), (0, 1, 2)]),
        ("worker-1@worker-0:2,0", "", [(0, 2), (0, 1, 2)]),
        ("worker-1:1@worker-1:0", "", [(), (0, 1)]),
        ("", "worker-0:1@worker-1:0", [(0, 2, 3), (1, 2)]),
        ("", "worker-0", [(), (0, 1, 2)]),
    ],
)
def test_filters_are_deepspeeds(include: str, exclude: str, expected: list[tuple[int, ...]]) -> None:
    wanted = [Host(host.name, slots) for host, slots in zip(HOSTS, expected, strict=True) if slots]
    assert select(HOSTS, include, exclude) == wanted


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "both given"),
        ("worker-2", "", "names the host 'worker-2'; there is worker-0, worker-1"),
        ("worker-1:3", "", "slot 3 of worker-1, which has slots 0 to 2"),
        ("worker-1:a", "", "expected NAME, or NAME:SLOT,SLOT like worker-1:0,2"),
        ("", "worker-0@worker-1", "leaves no slot"),
    ],
)
def test_filters_that_fit_no_host_are_refused(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(HOSTS, include, exclude)


def test_counts_take_the_first_hosts_and_slots() -> None:
    assert first(HOSTS, 1, 2) == [Host("worker-0", (0, 1))]
    with pytest.raises(ValueError, match="--num_nodes is 3, but there are only 2 hosts: worker-0, worker-1"):
        first(HOSTS, 3, None)
    with pytest.raises(ValueError, match="--num_gpus is 4, but worker-1 has only 3 slots"):
        first(HOSTS, None, 4)


def test_variables_that_go_to_other_hosts(tmp_path: Path) -> None:
    mine = {"ZEROPG_SECRET": "s", "NCCL_DEBUG": "INFO", "PYTHONPATH": "p", "HOME": "h", "PATH": "/bin"}
    of_one_host = {"ZEROPG_HOST_ID": "here", "TORCHELASTIC_RUN_ID": "1"}
    assert to_pass(mine | of_one_host) == {name: mine[name] for name in mine if name != "HOME"}
    # Nor do they with srun, which hands on what it has.
    assert of_launchers(mine | {"ZEROPG_HOST_ID": "here", "SSH_CONNECTION": "mine 1 login 22"}) == mine
    file = written(tmp_path / ".deepspeed_env", "# all hosts\nNCCL_DEBUG=WARN\nexport A='b c'\nB=x=y\n\n")
    assert read_environment_files([file]) == {"NCCL_DEBUG": "WARN", "A": "b c", "B": "x=y"}
    with pytest.raises(ValueError, match="line 1: 'NCCL_DEBUG WARN'; expected NAME=VALUE"):
        read_environment_files([written(file, "NCCL_DEBUG WARN\n")])
    with pytest.raises(ValueError, match="ZEROPG_HOST_ID is of one host"):
        read_environment_files([written(file, "ZEROPG_HOST_ID=a\n")])


def test_cores_are_divided_among_ranks_with_all_their_threads() -> None:
    assert parse_cpu_list("1,4-6") == [1, 4, 5, 6]
    for wrong in ("1-", "a", "3-1", "1,1"):
        with pytest.raises(ValueError, match=r"expected CPUs like|names a CPU twice"):
            parse_cpu_list(wrong)
    cores = [[0, 4], [1, 5], [2, 6], [3, 7], [8]]
    assert divide(cores, 2) == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
    with pytest.raises(ValueError, match="6 ranks cannot be bound to 5 cores"):
        divide(cores, 6)


def test_launchers_fit_the_hosts() -> None:
    here = [Host("localhost", (0,))]
    assert [choose(None, here, slurm, "") for slurm in (False, True)] == ["local", "local"]
    assert [choose(None, HOSTS, slurm, "") for slurm in (False, True)] == ["ssh", "slurm"]
    assert choose(None, HOSTS, True, "rsh") == "ssh"
    with pytest.raises(ValueError, match="starts ranks on this machine alone"):
        choose("local", HOSTS, False, "")
    environment = {"PYTHONPATH": "a b", "ZEROPG_SECRET": "hidden"}
    by_ssh, by_rsh, by_srun = (
        LAUNCHERS[name].command(HOSTS[0], shell, environment)
        for name, shell in (("ssh", ""), ("ssh", "rsh -l me"), ("slurm", ""))
    )
    assert by_ssh[0] == "ssh" and by_ssh[-2] == "worker-0" and by_rsh[:4] == ["rsh", "-l", "me", "worker-0"]
    assert by_srun[by_srun.index("--nodelist") + 1 :][:3] == ["worker-0", "sh", "-c"]
    assert by_ssh[-1] == by_rsh[-1] == by_srun[-1] and "'PYTHONPATH=a b'" in by_ssh[-1]
    assert "hidden" not in by_ssh[-1]  # who lists the processes of a host does not read secrets


def test_slots_count_the_gpus_that_a_scheduler_has_granted() -> None:
    assert visible_gpus(None, [0, 2]) == "0,2"
    assert visible_gpus("4,5,GPU-8a", [0, 2]) == "4,GPU-8a"
    assert [visible_gpus(nothing, [0, 1]) for nothing in ("", "-1", "NoDevFiles")] == ["", "-1", "NoDevFiles"]
    with pytest.raises(ValueError, match="slot 2 is asked for, but CUDA_VISIBLE_DEVICES=4,5 grants 2 GPUs"):
        visible_gpus("4,5", [0, 2])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("me@a", Host("a", (0,), "me")),
        ("a:2222", Host("a", (0,), "", 2222)),
        ("me@10.0.0.1:22", Host("10.0.0.1", (0,), "me", 22)),
        ("fe80::1", Host("fe80::1", (0,))),
        ("me@[fe80::1]:22", Host("fe80::1", (0,), "me", 22)),
    ],
)
def test_a_host_may_have_a_user_and_a_port(text: str, expected: Host, tmp_path: Path) -> None:
    hosts = read_hostfile(written(tmp_path / "hosts", f"{text} slots=1\n"))
    assert hosts == [expected]
    assert choose(None, hosts, False, "") == choose(None, hosts, False, "ssh -v") == "ssh"
    line = LAUNCHERS["ssh"].command(expected, "ssh -o BatchMode=no", {})
    assert line[:3] == ["ssh", "-o", "BatchMode=no"] and "ServerAliveInterval=15" in line  # the first one counts
    assert line[-2] == (f"me@{expected.name}" if expected.user else expected.name)
    assert (line[-4:-2] == ["-p", str(expected.port)]) == (expected.port is not None)
    with pytest.raises(ValueError, match="which srun does not take" if text != "fe80::1" else "nothing"):
        choose("slurm", hosts, False, "")
        raise ValueError("nothing")
    if expected.port is not None:
        with pytest.raises(ValueError, match="has a port, which only ssh is told; give it in --rsh 'rsh -n'"):
            choose(None, hosts, False, "rsh -n")


def node_of(name: str, hello: Hello) -> Node:
    return Node(Host(name, (0,)), 0, "ssh", None, hello=hello)  # type: ignore[arg-type]


def test_hosts_are_told_addresses_that_they_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def hello(connection: str) -> Hello:
        monkeypatch.setenv("SSH_CONNECTION", connection)
        return _hello()

    here, there = hello("127.0.0.1 40000 127.0.0.1 22"), hello("10.0.0.1 40000 10.0.0.2 22")
    assert (there.address, there.is_sure) == ("10.0.0.2", True)
    assert not here.address.startswith("127.") and here.is_beside_launcher and not here.is_sure
    nodes = [node_of("localhost", here), node_of("worker-1", there)]
    # Others see the launcher's host where its ssh comes from.
    assert [command.address_of(node, nodes, "ssh") for node in nodes] == ["10.0.0.1", "10.0.0.2"]
    monkeypatch.setattr(command, "address_of_name", {"node1": "10.0.0.5", "node2": ""}.get)
    guesses = [node_of(name, Hello(f"172.17.0.{name[-1]}", {}, 0.0)) for name in ("node1", "node2")]
    assert [command.address_of(node, guesses, "slurm") for node in guesses] == ["10.0.0.5", "172.17.0.2"]


def test_what_the_launcher_has_got_takes_no_room_on_the_host(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    with path.open("wb") as file:
        file.write(b"a" * (4 << 20))
        file.flush()
        os.utime(path, ns=(1, 7))
        blocks = path.stat().st_blocks
        forget(path, 4 << 20)
        if path.stat().st_blocks == blocks:
            pytest.skip("this file system has no holes")
        assert path.stat().st_mtime_ns == 7
        file.write(b"and on")
        file.flush()
    assert path.stat().st_blocks < blocks // 4
    assert path.read_bytes() == bytes(4 << 20) + b"and on"


def test_standard_error_goes_its_own_way_and_breaks_into_no_line(tmp_path: Path) -> None:
    console, errors = io.StringIO(), io.StringIO()
    output = RankOutput(1, tmp_path, console, errors)
    for text, is_error in (("loss ", False), ("a warning\n", True), ("1.0\n", False), ("late", True)):
        output.write(0, text, is_error)
    output.close()
    assert console.getvalue() == "[rank 0] loss 1.0\n"
    assert errors.getvalue() == "[rank 0] a warning\n[rank 0] late\n"
    assert (tmp_path / "rank0.log").read_text() == "loss \na warning\n1.0\nlate"


def test_a_full_disk_ends_a_log_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    console, errors = io.StringIO(), io.StringIO()
    output = RankOutput(1, tmp_path, console, errors)
    output.write(0, "one\n")
    output.write(0, "two\n")
    output.close()
    assert console.getvalue() == "[rank 0] one\n[rank 0] two\n"
    assert errors.getvalue() == (
        f"zeropg run: {tmp_path / 'rank0.log'} ends here: [Errno 28] No space left on device\n"
    )


def test_lines_of_ranks_come_whole_and_progress_bars_do_not_pile_up(tmp_path: Path) -> None:
    console = io.StringIO()
    output = RankOutput(11, tmp_path, console)
    for rank, text in ((0, "one\ntw"), (10, "ten\r\n"), (0, "o\n\r10 %"), (0, "\r90 %\r100 %\n"), (1, "no end")):
        output.write(rank, text)
    output.close()
    assert console.getvalue().splitlines() == [
        "[rank  0] one",
        "[rank 10] ten",
        "[rank  0] two",
        "[rank  0] 100 %",
        "[rank  1] no end",
    ]
    assert (tmp_path / "rank0.log").read_bytes() == b"one\ntwo\n\r10 %\r90 %\r100 %\n"
    assert output.tail(0) == ["one", "two", "100 %"] and output.path(1) == tmp_path / "rank1.log"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_gpus", "2", "--include", "localhost", "x.py"], "cannot be combined"),
        (["--hostfile", "nowhere", "x.py"], "No such file or directory: 'nowhere'"),
        (["--num_gpus", "0", "x.py"], "expected at least 1"),
        (["--bind_core_list", "3-1", "x.py"], "expected CPUs like"),
        (["-m", "--no_python", "x"], "both given"),
        (["--launcher", "OpenMPI", "x.py"], "OpenMPI: MPI's launchers start ranks by daemons of their own"),
        (["--launcher", "rsh", "x.py"], "'rsh'; expected one of ssh, slurm, local, pdsh"),
        (["--autotuning", "run", "x.py"], "--autotuning is not available: python -m zeropg tune"),
        (["--elastic_training", "x.py"], "--elastic_training is not available: hosts do not come and go"),
        (["--launcher_args", "-v", "x.py"], "--launcher_args"),
        (["--no_ssh", "--node_rank", "1", "x.py"], "--no_ssh is not available: this command starts all hosts"),
        (["--venv_script", "activate", "x.py"], "start it by that environment's python"),
        (["--force_multi", "--launcher", "local", "--hostfile", "nowhere", "x.py"], "No such file"),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_options_of_deepspeed_mean_the_same_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--launcher PDSH --enable_each_rank_log logs --num_gpus -1 --num_nodes -1 --no_local_rank --no_ssh_check"
    options, _ = command._parse([*line.split(), "--log_level", "debug", "-q", "--module", "train", "--save_pid"])
    assert (options.launcher, options.log_dir, options.num_gpus, options.num_nodes) == ("ssh", Path("logs"), None, None)
    assert (options.module, options.local_rank, options.arguments) == (True, False, ["--save_pid"])
    options, _ = command._parse(["--force_multi", "--enable_each_rank_log", "None", "--num_accelerators", "3", "x.py"])
    assert (options.launcher, options.log_dir, options.num_gpus) == ("ssh", None, 3)
    monkeypatch.setattr(deepspeeds_options, "_PID_FOLDER", tmp_path)
    with deepspeeds_options.saved_pid(True):
        (file,) = tmp_path.iterdir()
        assert (file.name, file.read_text()) == (f"{os.getpid()}.deepspeed", str(os.getpid()))
        with pytest.raises(SystemExit):
            command.main(["--save_pid", "--num_gpus", "1", "x.py"])
    assert not list(tmp_path.iterdir())


# --- Ranks of this machine ---

PROGRAM = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], sys.argv[1:])
print(sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], os.environ["A"], file=sys.stderr)
"""


def test_ranks_run_with_logs_variables_and_cores_of_their_own(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", PROGRAM)
    variables = written(tmp_path / "variables", "A=from the file\n")
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    options = ["--num_gpus", "2", "--log_dir", str(tmp_path / "logs"), "--environment_file", str(variables)]
    options += ["--bind_core_list", ",".join(map(str, cpus)), "--local_rank"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = run_program([*RUN, *options, str(script), "--deepspeed", "-x"], timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines() for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert sorted(log) == sorted(
            [f"{rank} 2 {rank} {[f'--local_rank={rank}', '--deepspeed', '-x']}", f"[{cpus[rank]}] 1 from the file"]
        )
        for line in log:
            assert f"[rank {rank}] {line}" in (done.stderr if line.startswith("[") else done.stdout)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["train.py", "-x"], [sys.executable, "-u", "train.py", "--local_rank=3", "-x"]),
        (["-m", "train", "-x"], [sys.executable, "-u", "-m", "train", "--local_rank=3", "-x"]),
        (["--no-python", "train", "-x"], ["train", "--local_rank=3", "-x"]),
    ],
)
def test_the_local_rank_comes_before_a_programs_own_arguments(command: list[str], expected: list[str]) -> None:
    plan = Plan(0, 1, 0, 1, "", "", 0, command, {}, None, None, silence=1.0, passes_local_rank=True)
    words = torchrun_arguments(plan, "logs")
    program = words[words.index("--no-python") + 1 :]
    assert program[:2] == [sys.executable, "-S"] and Path(program[2]).name == "local_rank.py"
    place = int(program[3])
    assert [*program[4 : 4 + place], "--local_rank=3", *program[4 + place :]] == expected


FAILING = """
import os, subprocess, sys, time
if os.environ["RANK"] == "1":
    print("a child is", subprocess.Popen(["setsid", "sleep", "600"]).pid, flush=True)
    sys.exit("what rank 1 had to say")
print("rank 0 is", os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_rank_that_fails_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", FAILING)
    done = run_program([*RUN, "--num_gpus", "2", "--log_dir", str(tmp_path), str(script)], timeout=300)
    assert done.returncode == 1
    said = done.stderr
    assert "rank 1 on localhost failed first: exit code 1; all ranks are stopped" in said, said
    assert said.index("what rank 1 had to say") < said.index("failed first")
    assert f"its log: {tmp_path / 'rank1.log'}" in said
    pids = [int(line.split()[-1]) for line in done.stdout.splitlines() if "rank 0 is" in line or "a child is" in line]
    assert len(pids) == 2 and not any(lives(pid) for pid in pids)


def test_logs_that_cannot_be_are_a_sentence_before_anything_starts(tmp_path: Path) -> None:
    script, file = written(tmp_path / "script.py", "print('started')"), written(tmp_path / "file", "")
    done = run_program([*RUN, "--num_gpus", "1", "--log_dir", str(file / "logs"), str(script)], timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"zeropg run: --log_dir: [Errno 20] Not a directory: '{file / 'logs'}'; nothing is started\n"


def test_ctrl_c_stops_all_ranks(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", 'import os, time\nprint("I am", os.getpid(), flush=True)\ntime.sleep(600)')
    pipe = subprocess.PIPE
    # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*RUN, "--num_gpus", "2", str(script)], stdout=pipe, stderr=pipe, text=True) as process:
        signal.signal(signal.SIGINT, before)
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            _, said = process.communicate(timeout=200)
        except BaseException:
            kill_with_children(process.pid)
            raise
    assert process.returncode == 130 and "SIGINT: all ranks are stopped" in said, said
    assert time.monotonic() - start < 30
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


BEATING = """
import os, time
print(os.getpid(), flush=True)
for _ in range(100):
    print("beat", flush=True)
    time.sleep(0.1)
"""


def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", BEATING.replace("100", "30"))
    line = ["env", "nohup", *RUN, "--num_gpus", "1", "--log_dir", str(tmp_path), str(script)]
    here, there = os.openpty()
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=there) as process:
        try:
            os.close(there)
            assert process.stdout is not None
            process.stdout.readline()
            os.close(here)
            process.send_signal(signal.SIGHUP)
            said = process.stdout.read().decode()
            assert process.wait(timeout=200) == 0 and said.count("beat") == 30, said
        except BaseException:
            kill_with_children(process.pid)
            raise


def test_a_run_that_nobody_reads_ends(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", BEATING)
    pipe = subprocess.PIPE
    with subprocess.Popen([*RUN, "--num_gpus", "1", str(script)], stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            pid = int(process.stdout.readline().split()[-1])
            process.stdout.close()
            said = process.stderr.read().decode()
            assert process.wait(timeout=200) == 128 + signal.SIGPIPE and "SIGPIPE: all ranks are stopped" in said, said
        except BaseException:
            kill_with_children(process.pid)
            raise
    assert "Traceback" not in said and not Path(f"/proc/{pid}").exists()


def beat(pipe: IO[bytes], is_cut: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        while not is_cut.wait(0.2):
            pipe.write(b"\n")
            pipe.flush()


def test_ranks_end_where_the_network_to_the_launcher_is_cut(tmp_path: Path) -> None:
    """Nothing comes through it any more, and not its end either."""
    script = written(tmp_path / "script.py", BEATING.replace("100", "6000"))
    plan = Plan(0, 1, 0, 1, "", "", 0, [str(script)], {}, None, None, silence=1.0)
    pipe, is_cut = subprocess.PIPE, threading.Event()
    with subprocess.Popen([sys.executable, "-m", NODE], stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(to_line(plan))
            process.stdin.flush()
            signs_of_life = threading.Thread(target=beat, args=(process.stdin, is_cut))
            signs_of_life.start()
            messages = (from_line(line) for line in process.stdout if line != b"\n")
            pid = int(next(message.text for message in messages if message.__class__.__name__ == "Output").split()[0])
            time.sleep(3 * plan.silence)
            assert process.poll() is None and Path(f"/proc/{pid}").exists()
            is_cut.set()
            signs_of_life.join()
            start = time.monotonic()
            for _ in messages:
                pass
            process.wait(timeout=60)
            assert time.monotonic() - start < 30
        except BaseException:
            is_cut.set()
            kill_with_children(process.pid)
            raise
    assert not Path(f"/proc/{pid}").exists()
    assert command._SILENCE_SECONDS >= 3 * BEAT_SECONDS


SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames node[7]" ] && echo node7\n'
SRUN = '#!/bin/sh\necho "$ZEROPG_HOST_ID $*" > "$0.called"\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'


def test_in_an_allocation_srun_reaches_the_hosts_of_the_job(tmp_path: Path) -> None:
    """Stand-ins for slurm's commands, which only a cluster has.

    Tried once with slurm 22.05: slurmctld, slurmd and munge on two hosts of tests/lab, salloc and sbatch, 2 x 2 ranks
    over zeropg, a rank that fails, and scancel.
    """
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        written(tmp_path / name, text).chmod(0o755)
    script = written(
        tmp_path / "script.py", 'import os\nprint("rank", os.environ["RANK"], os.environ["ZEROPG_SECRET"])'
    )
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[7]", "SLURM_NTASKS_PER_NODE": "1"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ZEROPG_SECRET": "whisper"}
    environment["ZEROPG_HOST_ID"] = "login"
    done = run_program([*RUN, str(script)], timeout=300, env=environment)
    assert done.returncode == 0 and "[rank 0] rank 0 whisper" in done.stdout, done.stdout + done.stderr
    called = (tmp_path / "srun.called").read_text()
    assert "--nodes=1 --ntasks=1 --overlap" in called and "--nodelist node7 sh -c cd " in called
    assert "whisper" not in called and "login" not in called
