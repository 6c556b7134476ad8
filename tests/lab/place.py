"""Runs functions on ranks in the lab's hosts, with tests/spawn.py: `run_ranks(4, function, place=HostsPlace(lab))`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed

from tests.spawn import Place
from zeropg.tools.lab.lab import SWITCH_ADDRESS, Lab

FORK = multiprocessing.get_context("forkserver")
_KINDS = ("net", "mnt", "uts", "ipc", "pid_for_children")


@dataclass(frozen=True, init=False)
class HostsPlace(Place):
    """`per_host` ranks on each host of a lab, in order; the store stands on the switch and outlives every host."""

    pids: tuple[int, ...]  # whose namespaces are the hosts'
    identities: tuple[tuple[tuple[str, str], ...], ...]  # the variables of each host
    switch: int
    per_host: int

    def __init__(self, lab: Lab, per_host: int = 2) -> None:
        fields = {
            "pids": tuple(host.process.pid for host in lab.hosts),
            "identities": tuple(tuple(host.identity().items()) for host in lab.hosts),
            "switch": lab.switch_pid,
            "per_host": per_host,
            "address": SWITCH_ADDRESS,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def enter(self, rank: int) -> None:
        enter_namespaces(self.pids[rank // self.per_host], _KINDS)
        _become_child()

    def open_store(self, timeout: float) -> Any:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=_serve_store, args=(theirs, self.switch, self.address, timeout), daemon=True)
        process.start()
        theirs.close()
        return _Store(ours.recv(), process)

    def close_store(self, store: Any) -> None:
        store.process.kill()
        store.process.join()

    def environment(self, rank: int) -> dict[str, str]:
        host, local_rank = divmod(rank, self.per_host)
        local = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.per_host)}
        return local | dict(self.identities[host])


@dataclass
class _Store:
    port: int
    process: Any


def _serve_store(connection: Connection, switch: int, address: str, timeout: float) -> None:
    """A store on the switch, until this process is killed or its parent ends."""
    enter_namespaces(switch, ("net",))
    store = torch.distributed.TCPStore(address, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    connection.send(store.port)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def enter_namespaces(pid: int, kinds: tuple[str, ...]) -> None:
    """Moves this process, which must have one thread, into the namespaces that `pid` holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    if os.geteuid() != 0:
        kinds = ("user", *kinds)
    files = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    for kind, file in zip(kinds, files, strict=True):
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of process {pid}")
        os.close(file)
    os.chdir(folder)


def _become_child() -> None:
    """Goes on as a child, since only children are in the new PID namespace; the parent does as the child does."""
    child = os.fork()
    if child == 0:
        return
    forward: Callable[..., None] = lambda number, _: os.kill(child, number)  # noqa: E731
    signal.signal(signal.SIGUSR1, forward)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)
