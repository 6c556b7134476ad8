"""`python -m zeropg run` over hosts that are reached by ssh itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.secure_shells import missing_sshd, secure_shells
from zeropg.tools.lab.lab import Job, Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]

PORT = 2222
SECRET = "whispered from host to host"


@dataclass
class Hosts:
    """keys: the folder of secure_shells. place: where programs run, with a blank in its path."""

    lab: Lab
    keys: Path
    bin: Path
    place: Path

    def start(self, hostfile: str, *options: str, script: str) -> subprocess.Popen[str]:
        """Runs a script by its name, from its folder, as somebody who is at work on host0."""
        (self.place / "hosts").write_text(hostfile)
        (self.place / "a script.py").write_text(script)
        inside = 'cd "$0" && exec "$@"'
        command = [sys.executable, "-m", "zeropg", "run", "--hostfile", "hosts", *options, "a script.py", "an argument"]
        # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            variables = {"PATH": f"{self.bin}:{os.environ['PATH']}", "ZEROPG_SECRET": SECRET}
            return self.lab.run(0, ["sh", "-c", inside, str(self.place), *command], env=variables)
        finally:
            signal.signal(signal.SIGINT, before)

    def processes(self) -> list[str]:
        """What runs on the hosts, whole lines, but for zombies and what the lab itself has there."""
        listed = []
        for index in range(len(self.lab.hosts)):
            (done,) = Job([self.lab.run(index, ["ps", "-ewwo", "stat=,args="])]).wait(timeout=60)
            listed += [line for line in done.stdout.splitlines() if not line.startswith("Z")]
        return sorted(line for line in listed if not line.endswith("ps -ewwo stat=,args="))


@pytest.fixture(scope="module")
def hosts(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = missing_sshd()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("by ssh")
    for name in ("keys", "at work"):
        (folder / name).mkdir()
    with Lab(hosts=2) as lab, secure_shells(lab, folder / "keys", PORT) as programs:
        yield Hosts(lab, folder / "keys", programs, folder / "at work")


def settled(hosts: Hosts, before: list[str]) -> list[str]:
    """What runs on the hosts, and did not before, when sshd has had a moment to end its sessions."""
    deadline = time.monotonic() + 10
    while (left := [line for line in hosts.processes() if line not in before]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


ADDING = """
import os, pathlib, socket, subprocess, sys, torch, torch.distributed as dist
import zeropg
dist.init_process_group("zeropg")
tensor = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(tensor)
subprocess.Popen(["setsid", "sleep", "4000"])
lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
shown = any(os.environ["ZEROPG_SECRET"].encode() in line for line in lines)
print(socket.gethostname(), os.environ["LOCAL_RANK"], tensor.item(), len(zeropg.topology().nodes), sys.argv, shown)
sys.stdout.flush()
dist.barrier()
if dist.get_rank() == 3:
    os._exit(7)
dist.barrier()
"""


def test_ranks_meet_and_leave_nothing_behind_when_one_fails(hosts: Hosts) -> None:
    before = hosts.processes()
    options = ["--ssh_port", str(PORT), "--exclude", "host0:1", "--log_dir", "my logs"]
    process = hosts.start(f"root@host0:{PORT} slots=2\nhost1 slots=3\n", *options, script=ADDING)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 1, said + errors
    places = ["host0 0", "host1 0", "host1 1", "host1 2"]
    expected = [f"{place} 10.0 2 ['a script.py', 'an argument'] False" for place in places]
    assert sorted(said.splitlines()) == [f"[rank {rank}] {line}" for rank, line in enumerate(expected)], said + errors
    assert "zeropg run: rank 3 on host1 failed first: exit code 7; all ranks are stopped" in errors
    assert all(line in (hosts.place / "my logs" / f"rank{rank}.log").read_text() for rank, line in enumerate(expected))
    assert settled(hosts, before) == []


BEATING = """
import os, time
print("rank", os.environ["RANK"], "is here", flush=True)
time.sleep(600)
"""


def test_ctrl_c_stops_the_ranks_of_all_hosts(hosts: Hosts) -> None:
    before = hosts.processes()
    process = hosts.start("host0 slots=1\nhost1 slots=1\n", "--ssh_port", str(PORT), script=BEATING)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [
        f"[rank {rank}] rank {rank} is here\n" for rank in "01"
    ]
    launcher = next(line for line in hosts.processes() if "zeropg run --hostfile" in line).split(maxsplit=1)[1]
    assert hosts.lab.run(0, ["pkill", "-INT", "-fx", launcher]).wait(timeout=60) == 0, launcher
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "zeropg run: SIGINT: all ranks are stopped" in errors, errors
    assert settled(hosts, before) == []


def test_hosts_that_let_nobody_in_are_a_sentence_each_with_what_helps(hosts: Hosts) -> None:
    config, known = hosts.keys / "config", hosts.keys / "known_hosts"
    kept = config.read_text(), known.read_text()
    try:
        # Of host0 no key is known, host1 does not know ours, and at 127.0.0.1 there is no sshd.
        config.write_text(kept[0].replace('/key"', '/wrong_key"'))
        known.write_text("".join(line for line in kept[1].splitlines(keepends=True) if "host0" not in line))
        hostfile = f"host0 slots=1\nroot@host1:{PORT} slots=1\n127.0.0.1:9 slots=1\n"
        process = hosts.start(hostfile, "--ssh_port", str(PORT), script=BEATING)
        said, errors = process.communicate(timeout=300)
    finally:
        config.write_text(kept[0])
        known.write_text(kept[1])
    assert process.returncode == 1 and said == ""
    assert errors == (
        "zeropg run: host0 cannot be reached: ssh ended with 255 and said: Host key verification failed. "
        f"(connect once by hand, `ssh -p {PORT} host0`, and see what it says of the host's key); "
        "host1 cannot be reached: ssh ended with 255 and said: root@host1: Permission denied (publickey). "
        f"(a login without a password is needed: `ssh-copy-id -p {PORT} root@host1`); "
        "127.0.0.1 cannot be reached: ssh ended with 255 and said: ssh: connect to host 127.0.0.1 port 9: Connection "
        "refused; nothing is started\n"
    )
