"""Somebody on the way between two hosts changes one bit of what a rank sends (Note [Authentic frames])."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.lab.place import FORK, HostsPlace, enter_namespaces
from tests.spawn import RankPool
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]

PORT = 29_777
NUMEL = 1 << 22
CHANGED_BYTE = 5_000_000  # of what rank 1 sends: inside an all-reduce of 16 MiB
SECONDS = 60


class Outcome(NamedTuple):
    error: str
    wrong: int  # elements of the result
    seconds: float


def relay(source: socket.socket, target: socket.socket, changed_byte: int | None) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(1 << 16)):
            if changed_byte is not None and passed <= changed_byte < passed + len(data):
                data[changed_byte - passed] ^= 0x40
            passed += len(data)
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def stand_in_between(connection: Connection, host: int, address: str, switch: int) -> None:
    """Takes what comes from `host` for `address`, and hands it on from the switch."""
    enter_namespaces(host, ("net",))
    Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")  # the host itself must not answer for the address
    subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    listener = socket.create_server((address, PORT))
    enter_namespaces(switch, ("net",))
    connection.send("ready")
    inner, _ = listener.accept()
    outer = socket.create_connection((address, PORT))
    back = threading.Thread(target=relay, args=(outer, inner, None), daemon=True)
    back.start()
    relay(inner, outer, CHANGED_BYTE)
    back.join()


@contextlib.contextmanager
def somebody_in_between(lab: Lab) -> Iterator[None]:
    ours, theirs = FORK.Pipe()
    places = (lab.hosts[1].process.pid, lab.hosts[0].address, lab.switch_pid)
    process = FORK.Process(target=stand_in_between, args=(theirs, *places), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    yield
    process.kill()
    process.join()


def reduce_once(is_authentic: bool) -> Outcome:
    rank = int(os.environ["RANK"])
    if rank == 0:
        os.environ["ZEROPG_PORTS"] = f"{PORT}-{PORT}"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=SECONDS)
    )
    options = zeropg.BackendOptions(
        network="tcp", secret="a secret", authenticate_frames=is_authentic, measure_links=False
    )
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("zeropg", store=store, rank=rank, world_size=2, timeout=limit, pg_options=options)
    tensor = torch.ones(NUMEL)
    start = time.monotonic()
    error = ""
    try:
        dist.all_reduce(tensor)
    except Exception as raised:
        error = str(raised)
    return Outcome(error, int((tensor != 2).sum()), time.monotonic() - start)


@pytest.mark.parametrize("is_authentic", [True, False])
def test_a_bit_changed_on_the_way(is_authentic: bool) -> None:
    with (
        Lab(hosts=2) as lab,
        somebody_in_between(lab),
        RankPool(2, backend=None, place=HostsPlace(lab, per_host=1)) as pool,
    ):
        outcomes = pool.run(reduce_once, is_authentic, timeout=150)
    if is_authentic:
        assert "the connection to rank 1 broke (a frame's tag did not match" in outcomes[0].error
        assert "rank 0" in outcomes[1].error
        assert all(outcome.seconds < SECONDS / 2 for outcome in outcomes), outcomes
    else:
        assert [outcome.error for outcome in outcomes] == ["", ""]
        assert outcomes[0].wrong == 1, "nobody notices"
