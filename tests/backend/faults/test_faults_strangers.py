"""Strangers at the doors of a group: who does not prove its secret learns nothing and harms nobody.

The doors are those of backend/bootstrap: node_admission.h (a socket of the node) and tcp_mesh.h (a port between
nodes). They are open while a group is made, so one rank of the tests is slow to read who is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import SeparateHosts, run_ranks

SECRET = b"the secret of the group"
PATIENCE_SECONDS = 60
VISITED = "visited"  # set in the store when the strangers have done their worst
NOBODY = 65534


class SlowStore(dist.Store):
    """Hands everything on, but holds its rank back before it can read `key`, until the strangers were there."""

    def __init__(self, store: dist.Store, key: str) -> None:
        super().__init__()
        self._store = store
        self._key = key

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        if key.endswith(self._key):
            limit = time.monotonic() + PATIENCE_SECONDS
            while not self._store.check([VISITED]) and time.monotonic() < limit:  # `wait` would block other threads
                time.sleep(0.02)
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key  # what the trampoline of a Store looks for


def sockets_of(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(match[1])
        except FileNotFoundError:
            continue
    return inodes


def node_doors(pid: int) -> list[str]:
    """The abstract names on which the process listens."""
    inodes = sockets_of(pid)
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return [row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[3] == "00010000"]


def tcp_doors(pid: int) -> list[int]:
    """The ports on which the process listens."""
    inodes = sockets_of(pid)
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def wait_for(doors: Callable[[int], list[Any]], pid: int, known: list[Any]) -> Any:
    """A door that is none of `known`."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while not (found := [door for door in doors(pid) if door not in known]):
        assert time.monotonic() < limit, "no door was opened"
        time.sleep(0.005)
    return found[0]


def published_doors(store: dist.Store) -> list[str]:
    """Where each rank of the group listens on its node, as everybody reads it in the store."""
    key = "zeropg/zeropg/map"
    limit = time.monotonic() + PATIENCE_SECONDS
    while not store.check([key]):
        assert time.monotonic() < limit, "there is no map"
        time.sleep(0.005)
    return [name.decode() for name in re.findall(rb"zeropg-[0-9a-f]{32}", store.get(key))]


def text_field(text: bytes) -> bytes:
    """As in a record in the store."""
    return struct.pack("<q", len(text)) + text


def derived_key(secret: bytes, doors: list[str]) -> bytes:
    names = struct.pack("<q", len(doors)) + b"".join(text_field(door.encode()) for door in doors)
    salt = hashlib.sha256(text_field(b"zeropg salt1") + names).digest()
    return hashlib.scrypt(secret, salt=salt, n=2**14, r=8, p=1, dklen=32)


def prove(leader_nonce: bytes, member_nonce: bytes, name: str, key: bytes) -> bytes:
    return hmac.new(key, b"zeropg proof M1" + leader_nonce + member_nonce + name.encode(), hashlib.sha256).digest()


def read(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer when the other side hung up."""
    data = b""
    try:
        while len(data) < count and (part := connection.recv(count - len(data))):
            data += part
    except (ConnectionError, TimeoutError):
        pass
    return data


class Strangers:
    """Each speaks to one door in its own way and notes what came back after the door's challenge."""

    def __init__(self, dial: Callable[[], socket.socket], name: str, hello: bytes, doors: list[str]) -> None:
        self._dial = dial
        self._name = name  # what enters the proofs
        self._hello = hello  # what stands before a proof
        self._key = derived_key(SECRET, doors)
        self._wrong_key = derived_key(b"a guess", doors)
        self.heard: dict[str, bytes] = {}

    def connect(self) -> tuple[socket.socket, bytes]:
        connection = self._dial()
        connection.settimeout(PATIENCE_SECONDS)
        return connection, read(connection, 32)

    def say(self, who: str, words: Callable[[bytes], bytes]) -> None:
        connection, challenge = self.connect()
        with contextlib.suppress(ConnectionError):
            connection.sendall(words(challenge))
        self.heard[who] = read(connection, 100)
        connection.close()

    def come(self) -> list[socket.socket]:
        """All of them; returns those that stay and are silent."""
        silent = [self.connect()[0] for _ in range(5)]
        mine = os.urandom(32)
        recorded = b""

        def true(challenge: bytes) -> bytes:
            nonlocal recorded
            recorded = self._hello + mine + prove(challenge, mine, self._name, self._key)
            return recorded

        connection, challenge = self.connect()
        connection.sendall(true(challenge))
        self.heard["the truth"] = read(connection, 32)  # the door's own proof: these tests speak its language
        silent.append(connection)
        self.say("a replay", lambda _: recorded)
        self.say("garbage", lambda _: os.urandom(len(recorded)))
        self.say("too much", lambda _: os.urandom(60_000))
        self.say("a huge length", lambda _: struct.pack("<QQ", 2**63 - 1, 2**64 - 1) * 8)
        self.say("HTTP", lambda _: b"GET / HTTP/1.1\r\nHost: zeropg\r\nAccept: */*\r\nX-Padding: 123456789\r\n\r\n")
        self.say(
            "another secret",
            lambda challenge: self._hello + mine + prove(challenge, mine, self._name, self._wrong_key),
        )
        self.say("the secret itself", lambda challenge: self._hello + mine + prove(challenge, mine, self._name, SECRET))
        self.say(
            "another group", lambda challenge: self._hello + mine + prove(challenge, mine, "zeropg-another", self._key)
        )
        self.say("an echo", lambda challenge: self._hello + challenge + challenge)
        for _ in range(20):
            self._dial().close()
        return silent


def dial_node(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + name.removeprefix("@"))
    return connection


def form_a_group_among_strangers(is_tcp: bool) -> dict[str, bytes]:
    from zeropg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["ZEROPG_SECRET"] = SECRET.decode()
    known = tcp_doors(os.getpid())  # gloo's
    processes: list[Any] = [None] * size
    dist.all_gather_object(processes, (os.getpid(), known))
    store = dist.PrefixStore("strangers", dist.distributed_c10d._get_default_store())
    # What the last rank needs to knock at the others' doors.
    needed = "zeropg/addresses" if is_tcp else "zeropg/map"
    slow: dist.Store = SlowStore(store, needed) if rank == size - 1 else store
    options = _C.BackendOptions(secret=SECRET.decode())
    options._timeout = timedelta(seconds=PATIENCE_SECONDS)
    heard: dict[str, bytes] = {}
    troubles: list[BaseException] = []

    def visit() -> None:
        try:
            doors = published_doors(store)
            name = doors[0]
            if is_tcp:
                port = wait_for(tcp_doors, *processes[0])
                hello = struct.pack("<i", size - 1)
                strangers = Strangers(
                    lambda: socket.create_connection(("127.0.0.1", port)), f"{name}/{size - 1}>0", hello, doors
                )
            else:
                strangers = Strangers(lambda: dial_node(name), name, b"", doors)
            strangers.come()
            heard.update(strangers.heard)
        except BaseException as error:
            troubles.append(error)
        store.set(VISITED, "")

    visitor = threading.Thread(target=visit)
    if rank == 1:
        visitor.start()
    group = _C.ProcessGroupZero(slow, rank, size, options)
    if rank == 1:
        visitor.join()
    assert not troubles, troubles
    total = torch.ones(100_000)
    group.allreduce([total]).wait()
    assert (total == size).all()
    assert not node_doors(os.getpid()) and tcp_doors(os.getpid()) == known, "doors close once everybody is there"
    group.shutdown()
    return heard


@pytest.mark.parametrize("is_tcp", [False, True])
def test_strangers_are_refused_and_the_group_is_unharmed(is_tcp: bool) -> None:
    place = SeparateHosts(hosts=(0, 1, 2) if is_tcp else (0, 0, 0))
    heard = run_ranks(3, form_a_group_among_strangers, is_tcp, backend="gloo", place=place, timeout=180)[1]
    assert len(heard.pop("the truth")) == 32
    assert len(heard) >= 8 and not any(heard.values()), heard


def descriptors_opened_of(pid: int) -> list[str]:
    got = []
    for number in range(64):
        with contextlib.suppress(PermissionError):
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
            got.append(f"descriptor {number}")
    return got


def as_nobody(pid: int, doors: list[str]) -> list[str]:
    """What another user tries, and what it got."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    got = []
    for path in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
        with contextlib.suppress(PermissionError):
            got += [f"{path}: {os.listdir(path)}"]
    got += descriptors_opened_of(pid)
    with contextlib.suppress(PermissionError):
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        got.append("its memory")
    for door in doors:
        connection = dial_node(door)
        connection.settimeout(PATIENCE_SECONDS)
        if challenge := read(connection, 32):
            got.append(f"{door}: {challenge!r}")
    return got


def be_visited_by_nobody() -> list[str]:
    from zeropg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    store = dist.PrefixStore("nobody", dist.distributed_c10d._get_default_store())
    child = 0
    reader, writer = os.pipe()
    if rank == 1:
        ready, go = os.pipe()
        visited, done = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                got = as_nobody(pids[0], [wait_for(node_doors, pids[0], [])])
                os.write(done, b"d")
                os.read(ready, 1)  # and again when the group is there, with its arena
                got += descriptors_opened_of(pids[0])
            except BaseException as error:
                got = [f"{type(error).__name__}: {error}"]
            os.write(writer, "\n".join(got).encode())
            os._exit(0)
        threading.Thread(target=lambda: os.read(visited, 1) and store.set(VISITED, "")).start()
    group = _C.ProcessGroupZero(SlowStore(store, "zeropg/map") if rank == 1 else store, rank, size, _C.BackendOptions())
    group.barrier().wait()
    got = ""
    if rank == 1:
        os.write(go, b"g")
        os.close(writer)
        with open(reader, "rb") as pipe:
            got = pipe.read().decode()
        os.waitpid(child, 0)
    else:
        assert any("zeropg-arena" in os.readlink(f"/proc/self/fd/{name}") for name in open_descriptors())
    group.barrier().wait()
    group.shutdown()
    return got.splitlines()


def open_descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_gets_neither_the_arena_nor_an_answer() -> None:
    assert run_ranks(2, be_visited_by_nobody, backend="gloo", timeout=180)[1] == []
