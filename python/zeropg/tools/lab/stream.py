"""Plain TCP streams between hosts of a lab: what its links carry when nothing else does anything.

    with Lab(hosts=2, rate="200mbit") as lab:
        (rate,) = stream_rates(lab, [(0, 1)])  # bytes/s of payload: 23.9e6

This file is also the program that the hosts run. It imports nothing but Python's own modules, so it starts at once.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeropg.tools.lab.lab import Lab

_PORT = 7900
_PATIENCE = 30.0  # seconds, beyond those of the stream
_BLOCK = 1 << 18


def stream_rates(lab: Lab, pairs: Sequence[tuple[int, int]], seconds: float = 2.0, settle: float = 1.0) -> list[float]:
    """Bytes/s of payload that arrive in a stream of each (sender, receiver), all in the same `seconds`.

    `settle`: seconds before these, in which TCP opens its windows and the bursts of limited links are used up.
    Raises RuntimeError with what a program said that failed.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, (_, receiver) in enumerate(pairs):
            processes.append(_start(lab, receiver, "receive", str(_PORT + number), str(settle), str(seconds)))
        receivers = list(processes)
        for process in receivers:
            _expect(process, "listening")
        for number, (sender, receiver) in enumerate(pairs):
            where = (lab.hosts[receiver].address, str(_PORT + number))
            processes.append(_start(lab, sender, "send", *where, str(settle + seconds)))
        for process in receivers:
            _expect(process, "connected")
        for process in receivers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [_rate(process, settle + seconds) for process in receivers]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start(lab: Lab, host: int, *arguments: str) -> subprocess.Popen[str]:
    return lab.run(host, [sys.executable, "-S", __file__, *arguments], stdin=subprocess.PIPE)


def _expect(receiver: subprocess.Popen[str], word: str) -> None:
    assert receiver.stdout is not None
    if receiver.stdout.readline() != f"{word}\n":
        raise RuntimeError(f"a stream's receiver failed: {receiver.communicate()[1]}")


def _rate(receiver: subprocess.Popen[str], seconds: float) -> float:
    try:
        out, err = receiver.communicate(timeout=seconds + _PATIENCE)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a stream of {seconds} s did not end within {_PATIENCE} s more") from None
    if receiver.returncode != 0:
        raise RuntimeError(f"a stream's receiver failed: {err}")
    return float(out)


def _receive(port: int, settle: float, seconds: float) -> None:
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        server.settimeout(_PATIENCE)
        connection, _ = server.accept()
    print("connected", flush=True)
    sys.stdin.readline()  # until all streams are there
    connection.settimeout(_PATIENCE)
    buffer = bytearray(_BLOCK)
    _take_for(settle, connection, buffer)
    print(_take_for(seconds, connection, buffer))


def _take_for(seconds: float, connection: socket.socket, buffer: bytearray) -> float:
    """Bytes/s."""
    begin, total = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        total += _take(connection, buffer)
    return total / elapsed


def _take(connection: socket.socket, buffer: bytearray) -> int:
    count = connection.recv_into(buffer)
    if count == 0:
        raise ConnectionError("the sender ended the stream before its time")
    return count


def _send(address: str, port: int, seconds: float) -> None:
    block, end = bytes(_BLOCK), time.perf_counter() + seconds + _PATIENCE
    with socket.create_connection((address, port), timeout=_PATIENCE) as connection:
        while time.perf_counter() < end:
            try:
                connection.sendall(block)
            except OSError:  # the receiver has what it needs
                return


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    else:
        _send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
