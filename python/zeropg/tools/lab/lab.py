"""Hosts on this machine: namespaces with a network, processes, a host name and a /dev/shm of their own, on one switch.

    with Lab(hosts=2, rate="1gbit") as lab:
        jobs = lab.torchrun("train.py", "--steps", "3", nproc_per_node=2)  # 2 x 2 ranks
        sent = lab.interface_bytes(0).tx
        lab.cut(1)  # pull its cable

Each host has one network interface, eth0 with address 10.77.0.<host + 1>, on a veth pair to a bridge in a namespace of
its own: nothing touches the machine's network. `rate` limits every link in both directions (`tc tbf`). With racks, the
hosts of each are on a bridge of their own, and an uplink joins it to the bridge in the middle:

    Lab(hosts=4, rate="200mbit", racks=2, uplink="100mbit")  # hosts 0 and 1 are in one rack, 2 and 3 in the other

The namespaces have no names. They live as long as a process of ours that waits for the end of its standard input, so
they go, with every process in them, when the Lab is closed and also when the test is killed: there is nothing to clean
up. Root is not needed where the kernel lets users make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = ("ip", "tc", "unshare", "nsenter")
SWITCH_ADDRESS = "10.77.0.254"
NOBODY = "02:00:00:00:00:00"  # a hardware address that no interface has
SWITCH = "02:00:00:00:00:fe"
BURST = 256 << 10  # bytes that a limited link lets through at once after a pause
PACKAGES = Path(__file__).resolve().parents[3]  # the folder of the zeropg that is running
TRIAL_RATE = "tbf rate 1gbit burst 9kb latency 1ms"
# nsenter stops when its child does, and nobody would wake it: a shell between them stays awake.
STOPPABLE = ("sh", "-c", '"$@"; exit $?', "sh")
ENTER_USER = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
MAKE_USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]

# Process 1 of a host. /sys is mounted anew since it shows the interfaces of the namespace that mounted it; cgroups
# stay (without root `mount` moves them and then complains). Orphans leave no zombies: SIGCHLD is ignored.
HOST = """
set -e
hostname {name}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir /dev/shm/cgroup
mount --rbind /sys/fs/cgroup /dev/shm/cgroup
mount -t sysfs sysfs /sys
mount --move /dev/shm/cgroup /sys/fs/cgroup 2>/dev/null || true
rmdir /dev/shm/cgroup
echo '{names}' > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
ip link set lo up
trap '' CHLD
echo ready
exec cat
"""


@dataclass(frozen=True)
class Bytes:
    tx: int
    rx: int


@dataclass
class Host:
    """A namespace of each kind, and the process that holds them: `unshare`, whose child is process 1 of the host."""

    name: str
    address: str
    rack: str | None  # None: there are no racks
    process: subprocess.Popen[str]

    def enter(self) -> list[str]:
        """The command line that runs what follows it in this host."""
        pid = self.process.pid
        kinds = ["--net", "--mount", "--uts", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return ["nsenter", "-t", str(pid), *ENTER_USER, *kinds, f"--wdns={os.getcwd()}"]

    def identity(self) -> dict[str, str]:
        """The variables by which programs know where they run."""
        variables = {"ZEROPG_HOST_ID": f"lab-{self.name}", "GLOO_SOCKET_IFNAME": "eth0"}
        return variables if self.rack is None else variables | {"ZEROPG_RACK_ID": self.rack}


@dataclass
class Finished:
    """One process of a job."""

    returncode: int
    stdout: str
    stderr: str


class Job:
    """Processes in several hosts, started together."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes = list(processes)

    def wait(self, timeout: float) -> list[Finished]:
        """What each process wrote and returned; kills those that are still there after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        done = []
        for process in self.processes:
            try:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                err += f"\n(killed after {timeout} s)"
            done.append(Finished(process.returncode, out, err))
        return done


class Lab:
    """`hosts` simulated hosts, in equal parts in `racks` racks.

    `rate`: of each link and direction, as `tc` writes it ("100mbit"), one for all or one per host. `uplink`: of what
    joins each rack to the others, in each direction. None: no limit.
    """

    def __init__(
        self, hosts: int = 2, rate: str | Sequence[str | None] | None = None, racks: int = 1, uplink: str | None = None
    ) -> None:
        self.rates = [rate] * hosts if rate is None or isinstance(rate, str) else list(rate)
        if len(self.rates) != hosts:
            raise ValueError(f"{len(self.rates)} rates for {hosts} hosts: give one per host, or one for all")
        if racks < 1 or hosts % racks != 0:
            raise ValueError(f"{hosts} hosts cannot stand in {racks} racks: each rack has as many as the others")
        if racks == 1 and uplink is not None:
            raise ValueError("an uplink joins racks, and there is only one: give racks=2 or more")
        self._racks = racks
        self._uplink = uplink
        self._switch: subprocess.Popen[str] | None = None
        self.hosts: list[Host] = []

    def __enter__(self) -> Lab:
        try:
            self._switch = _hold([*_unshare("--net"), "sh", "-c", "echo ready; exec cat"])
            batch = [
                f"link add br0 address {SWITCH} type bridge",  # else a port's, which changes when a host goes
                "link set br0 up",
                f"addr add {SWITCH_ADDRESS}/24 dev br0",
                "link set lo up",
            ]
            self._run_in_switch("ip", "-batch", "-", stdin="\n".join(batch))
            for rack in range(self._racks if self._racks > 1 else 0):
                self._make_rack(rack)
            for index in range(len(self.rates)):
                self._make_host(index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            _release(host.process)
        if self._switch is not None:
            _release(self._switch)

    @property
    def switch_pid(self) -> int:
        """A process whose network namespace is the switch's, which is connected to every host."""
        assert self._switch is not None
        return self._switch.pid

    # --- running ---

    def run(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Starts a command in a host, with text pipes; `lab.torchrun` and `Job` wait for it."""
        return subprocess.Popen(
            [*self.hosts[host].enter(), *command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self.environment(host) | dict(env or {}),
        )

    def torchrun(
        self,
        *arguments: str,
        nproc_per_node: int | Sequence[int] = 2,
        rendezvous: str = "static",
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Starts torchrun with `arguments` (a script and its own, or -m and a module) on every host.

        `nproc_per_node`: the same on all hosts, or one number per host.
        """
        local = [nproc_per_node] * len(self.hosts) if isinstance(nproc_per_node, int) else nproc_per_node
        common = ["--nnodes", str(len(self.hosts))]
        if rendezvous == "static":
            common += ["--master-addr", self.hosts[0].address, "--master-port", "29500"]
        else:
            common += [
                "--rdzv-backend",
                "c10d",
                "--rdzv-id",
                "lab",
                "--rdzv-endpoint",
                f"{self.hosts[0].address}:29400",
            ]
        return Job(
            [
                self.run(
                    index,
                    [
                        *(sys.executable, "-m", "torch.distributed.run", *common, "--node-rank", str(index)),
                        *("--nproc-per-node", str(local[index]), "--local-addr", host.address, *arguments),
                    ],
                    env=env,
                )
                for index, host in enumerate(self.hosts)
            ]
        )

    def ranks(self, *command: str, hosts: Sequence[int], env: Mapping[str, str] | None = None) -> Job:
        """Starts the command once per rank, rank i on host `hosts[i]`, with torchrun's variables.

        No agent ends the others when a rank fails. Ranks may be stopped and continued by signals.
        """
        processes = []
        for rank, host in enumerate(hosts):
            variables: dict[str, int | str] = {"RANK": rank, "WORLD_SIZE": len(hosts), "GROUP_RANK": host}
            variables |= {"LOCAL_RANK": hosts[:rank].count(host), "LOCAL_WORLD_SIZE": hosts.count(host)}
            variables |= {"MASTER_ADDR": self.hosts[hosts[0]].address, "MASTER_PORT": 29500}
            text = {name: str(value) for name, value in variables.items()}
            processes.append(self.run(host, [*STOPPABLE, *command], env=text | dict(env or {})))
        return Job(processes)

    def environment(self, host: int) -> dict[str, str]:
        """The variables of every process in a host."""
        mine = self.hosts[host].identity() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return os.environ | mine | {"PYTHONPATH": os.environ.get("PYTHONPATH") or str(PACKAGES)}

    # --- the network ---

    def interface_bytes(self, host: int) -> Bytes:
        """What the host's eth0 has sent and received since the lab was made, headers and acknowledgements included."""
        for line in Path(f"/proc/{self.hosts[host].process.pid}/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == "eth0":
                columns = figures.split()
                return Bytes(tx=int(columns[8]), rx=int(columns[0]))
        raise AssertionError(f"{self.hosts[host].name} has no eth0")

    def cut(self, host: int) -> None:
        """Pulls the host's cable."""
        self._run_in_switch("ip", "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        self._run_in_switch("ip", "link", "set", f"port{host}", "up")

    def set_rate(self, host: int, rate: str | None) -> None:
        """Changes the rate of the host's link in both directions, while programs use it; None: no limit."""
        port = f"port{host}"
        if rate is not None:
            self._run_in_host(host, *_limit("eth0", rate))
            self._run_in_switch(*_limit(port, rate))
        elif self.rates[host] is not None:
            self._run_in_host(host, *_unlimit("eth0"))
            self._run_in_switch(*_unlimit(port))
        self.rates[host] = rate

    def separate(self, a: int, b: int) -> None:
        """Drops what two hosts send to each other; others, and the switch, still reach both."""
        for here, there in ((a, b), (b, a)):
            known = (self.hosts[there].address, "lladdr", NOBODY, "nud", "permanent")
            self._run_in_host(here, "ip", "neigh", "replace", *known, "dev", "eth0")

    def unite(self, a: int, b: int) -> None:
        """Undoes `separate`, if that was called."""
        for here, there in ((a, b), (b, a)):
            wrong = ("to", self.hosts[there].address, "nud", "permanent")
            self._run_in_host(here, "ip", "neigh", "flush", *wrong, "dev", "eth0")

    def kill(self, host: int) -> None:
        """Ends every process of the host at once (SIGKILL), and its network with them; returns when they are gone."""
        _release(self.hosts[host].process)

    def listening(self, host: int) -> list[tuple[str, int]]:
        """Address and port of every TCP socket of the host that accepts connections from other hosts."""
        found = set()
        for version in ("tcp", "tcp6"):
            path = Path(f"/proc/{self.hosts[host].process.pid}/net/{version}")
            for line in path.read_text().splitlines()[1:] if path.exists() else []:
                _, local, _, state, *_ = line.split()
                address, port = local.split(":")
                if state == "0A" and not address.endswith("0100007F"):
                    found.add((self.hosts[host].address, int(port, 16)))
        return sorted(found)

    def _make_rack(self, rack: int) -> None:
        batch = [
            f"link add rack{rack} type bridge",
            f"link set rack{rack} up",
            f"link add up{rack} type veth peer name down{rack}",
            f"link set up{rack} master rack{rack} up",
            f"link set down{rack} master br0 up",
        ]
        self._run_in_switch("ip", "-batch", "-", stdin="\n".join(batch))
        if self._uplink is not None:
            for end in ("up", "down"):
                self._run_in_switch(*_limit(f"{end}{rack}", self._uplink))

    def _make_host(self, index: int) -> None:
        count = len(self.rates)
        names = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} host{i}\n" for i in range(count))
        name, address = f"host{index}", f"10.77.0.{index + 1}"
        kinds = ("--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc", "--fork", "--kill-child")
        script = HOST.format(name=name, names=names)
        process = _hold([*self._enter_switch(), "unshare", *kinds, "sh", "-c", script])
        rack = f"rack{index * self._racks // count}" if self._racks > 1 else None
        self.hosts.append(Host(name, address, rack, process))
        port = f"port{index}"
        batch = [
            f"link add {port} type veth peer name eth0 netns {process.pid}",
            f"link set {port} master {rack or 'br0'} up",
        ]
        self._run_in_switch("ip", "-batch", "-", stdin="\n".join(batch))
        inside = [f"addr add {address}/24 dev eth0", "link set eth0 up"]
        self._run_in_host(index, "ip", "-batch", "-", stdin="\n".join(inside))
        self.set_rate(index, self.rates[index])

    def _enter_switch(self) -> list[str]:
        return ["nsenter", "-t", str(self.switch_pid), *ENTER_USER, "--net"]

    def _run_in_host(self, host: int, *command: str, stdin: str = "") -> str:
        return _run([*self.hosts[host].enter(), *command], stdin)

    def _run_in_switch(self, *command: str, stdin: str = "") -> str:
        return _run([*self._enter_switch(), *command], stdin)


def missing() -> str | None:
    """Why there can be no lab on this machine; None where it can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: iproute2, util-linux)"
    trial = (
        "ip link add name b type bridge; ip link add name p type veth peer name q; tc qdisc add dev p root "
        + TRIAL_RATE
    )
    command = [*_unshare("--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc", "--fork"), "sh", "-ec", trial]
    try:
        _run(command)
    except LabError as error:
        return f"namespaces with veth, bridge and tbf need root, or a kernel that allows them to users: {error}"
    return None


class LabError(RuntimeError):
    """A command that sets the lab up failed."""


def _limit(interface: str, rate: str) -> list[str]:
    shape = ("tbf", "rate", rate, "burst", f"{BURST}b", "latency", "50ms")
    return ["tc", "qdisc", "replace", "dev", interface, "root", *shape]


def _unlimit(interface: str) -> list[str]:
    return ["tc", "qdisc", "del", "dev", interface, "root"]


def _unshare(*kinds: str) -> list[str]:
    return ["unshare", *MAKE_USER, *kinds]


def _run(command: Sequence[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _hold(command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a command that says "ready" and then lives until its standard input ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise LabError(f"{' '.join(command)}: {process.stderr.read().strip()}")
    return process


def _release(process: subprocess.Popen[Any]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait(timeout=30)
