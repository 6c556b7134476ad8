"""How a process is started on a host: `LAUNCHERS`, one line each."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zeropg.tools.run.hosts import Host

NODE = "zeropg.tools.run.node"
# A host that asks a question, is switched off, or is lost shows soon. An option that stands before these counts.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
# One task on one node, inside the job's allocation and beside its other steps; all CPUs are its.
SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--unbuffered", "--nodelist")
_NEEDED_BY_PYTHON = ("PYTHONPATH", "LD_LIBRARY_PATH")  # before it can read the rest
_HERE = ("localhost", "127.0.0.1", "::1")
# What ssh says at its end, and what helps.
_REMEDIES = {
    "Host key verification failed": "connect once by hand, `ssh {login}`, and see what it says of the host's key",
    "Permission denied": "a login without a password is needed: `ssh-copy-id {login}`",
}


@dataclass(frozen=True)
class Launcher:
    """does: for --help. command: from a host and options to the command line that starts NODE there."""

    does: str
    command: Callable[[Host, str, Mapping[str, str]], list[str]]


def _by_ssh(host: Host, remote_shell: str, environment: Mapping[str, str]) -> list[str]:
    shell = shlex.split(remote_shell) if remote_shell else ["ssh"]
    if _is_ssh(shell[0]):
        shell += [*SSH_OPTIONS, *(() if host.port is None else ("-p", str(host.port)))]
    return [*shell, login(host), _remote_command(environment)]


def _by_srun(host: Host, remote_shell: str, environment: Mapping[str, str]) -> list[str]:
    return [*SRUN, host.name, "sh", "-c", _remote_command(environment)]


def _here(host: Host, remote_shell: str, environment: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-m", NODE]


def _remote_command(environment: Mapping[str, str]) -> str:
    """For the shell of the other host: this folder and this Python there."""
    variables = [f"{name}={environment[name]}" for name in _NEEDED_BY_PYTHON if name in environment]
    command = ["env", *variables, sys.executable, "-m", NODE]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"  # which csh and fish understand, too


def login(host: Host) -> str:
    """As ssh takes it."""
    return f"{host.user}@{host.name}" if host.user else host.name


def remedy(host: Host, said: str) -> str:
    """What to do where ssh ended with these words; "" where they say it themselves."""
    port = "" if host.port is None else f"-p {host.port} "
    found = next((remedy for words, remedy in _REMEDIES.items() if words in said), "")
    return found.format(login=port + login(host))


def _is_ssh(program: str) -> bool:
    return os.path.basename(program) == "ssh"


def address_of_name(name: str) -> str:
    """What a host's name stands for here; "" for nothing, and for this machine itself."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    return next((address for address in found if not is_loopback(address)), "")


def is_loopback(address: str) -> bool:
    """Whether an address means the machine that says it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


LAUNCHERS = {
    "ssh": Launcher("a shell on each host, by ssh or by what --rsh says", _by_ssh),
    "slurm": Launcher("srun, inside an allocation of slurm's", _by_srun),
    "local": Launcher("this machine alone", _here),
}


def choose(name: str | None, hosts: list[Host], is_under_slurm: bool, remote_shell: str) -> str:
    """Returns a launcher's name: the given one, or what fits the hosts. Raises ValueError where it cannot serve."""
    special = next((host for host in hosts if host.user or host.port is not None), None)
    is_here = len(hosts) == 1 and hosts[0].name in (*_HERE, socket.gethostname()) and special is None
    if name == "local" and not is_here:
        raise ValueError(f"--launcher local with the host {hosts[-1].name}; it starts ranks on this machine alone")
    if name is None:
        name = "local" if is_here and not remote_shell else "slurm" if is_under_slurm and not remote_shell else "ssh"
    if name == "slurm" and special is not None:
        raise ValueError(f"{special.name} has a user or a port of its own, which srun does not take; leave them out")
    by_other = name == "ssh" and remote_shell and not _is_ssh(shlex.split(remote_shell)[0])
    if by_other and (host := next((one for one in hosts if one.port is not None), None)) is not None:
        raise ValueError(f"{host.name} has a port, which only ssh is told; give it in --rsh {remote_shell!r}")
    return name


def slurm_hosts(environment: Mapping[str, str], slots: int | None) -> list[Host]:
    """The hosts of the allocation. Each has `slots`, else as many as slurm gave GPUs or tasks of one node, else 1.

    Raises ValueError where scontrol does not name them.
    """
    try:
        command = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
        names = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        raise ValueError(f"slurm does not say which hosts the job has ({error}); give a --hostfile") from None
    counts = [environment.get(name, "") for name in ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE")]
    found = slots or next((int(count) for count in counts if count.isdigit() and int(count) > 0), 1)
    return [Host(name, tuple(range(found))) for name in names]
