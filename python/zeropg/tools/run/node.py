"""The process on each host: runs torchrun as the launcher says, sends what ranks write, and ends with the launcher.

    python -m zeropg.tools.run.node

It speaks over standard input and output (messages.py). Whatever ends the input, be it the launcher, its death or a
connection that is gone, ends the ranks. So does a silence: where a network is cut nothing else tells of it.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zeropg.tools.run.cores import cores_of_this_host, divide, parse_cpu_list
from zeropg.tools.run.environment import visible_gpus
from zeropg.tools.run.launchers import is_loopback
from zeropg.tools.run.leftovers import MARK, kill_marked
from zeropg.tools.run.messages import Done, Failed, Hello, Message, Output, Plan, from_line, to_line

_POLL_SECONDS = 0.05
_CHUNK = 1 << 16
_FORGET_BYTES = 16 << 20  # of what a rank has written and the launcher has got
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # linux/falloc.h
_LIBC = ctypes.CDLL(None)
_GRACE_SECONDS = 40.0  # torchrun gives ranks 30 s between SIGTERM and SIGKILL
_IDLE_SECONDS = 2.0  # for torchrun to notice a signal before it has ranks
_BIND, _LOCAL_RANK = (Path(__file__).with_name(name) for name in ("bind.py", "local_rank.py"))
_WORDS_BEFORE_ARGUMENTS = {"--no-python": 1, "-m": 4}  # of `_program`'s; else python -u and a script


class Stopped(BaseException):
    """The launcher is gone, or wants the end."""


class _NoMeetingPoint(Exception):
    """The address or the port cannot serve."""


class Replies:
    """The way to the launcher; of several threads."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock, suppress(OSError):  # a launcher that is gone shows as the end of the input
            self._pipe.write(to_line(message))
            self._pipe.flush()


def main() -> int:
    """Run what comes; returns the exit status."""
    commands, pipe = _take_pipes()
    pipe.write(b"\n")  # the shell here may have begun a line, a greeting without an end
    replies = Replies(pipe)
    replies.send(_hello())
    line = commands.readline()
    if not line:
        return 0  # another host could not be reached
    plan: Plan = from_line(line)
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="zeropg-run-", ignore_cleanup_errors=True) as folder:
        is_over = threading.Event()
        threading.Thread(target=_end_with, args=(commands, plan.silence, folder, is_over), daemon=True).start()
        stores: list[TCPStore] = []
        with following(Path(folder), plan, replies):
            last_word = _run(plan, folder, stores)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end that follows a last word is no reason to stop
        if not isinstance(last_word, Done):
            kill_marked(folder)
        replies.send(last_word)
        if stores:
            is_over.wait()  # other hosts still use the store, and would complain of its end
    return 0 if isinstance(last_word, Done) else 1


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes to the launcher, out of the ranks' sight: these would inherit descriptors 0 and 1."""
    commands, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, replies


def _run(plan: Plan, folder: str, stores: list[TCPStore]) -> Failed | Done:
    """Runs torchrun to its end. stores: gets the one in which all hosts meet, if it is here."""
    try:
        os.environ.update(plan.environment)
        os.environ[MARK] = folder
        os.environ.setdefault("PYTHONUNBUFFERED", "1")  # else a rank that is killed loses its last words
        if plan.slots is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), plan.slots)
        if plan.node_rank == 0 and plan.nodes > 1:
            stores.append(_meeting_point(plan))
        torchrun.run(torchrun.parse_args(torchrun_arguments(plan, folder)))
    except _NoMeetingPoint as error:
        return Failed(None, 1, time.time(), str(error))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        since = _last_words(Path(folder), failure.local_rank) or time.time()
        return Failed(rank, failure.exitcode, since, "")
    except (Stopped, SignalException):
        return Failed(None, 0, time.time(), "stopped")
    except Exception as error:
        return Failed(None, 1, time.time(), f"{type(error).__name__}: {error}")
    return Done()


def _meeting_point(plan: Plan) -> TCPStore:
    """The store of all hosts. torchrun's own is the same one, of which this process then holds a second end."""
    try:
        return TCPStore(plan.master_addr, plan.master_port, None, True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise _NoMeetingPoint(
            f"the hosts cannot meet at {plan.master_addr}:{plan.master_port} here ({str(error).splitlines()[0]}); "
            "choose another port with --master_port, or another address of this host with --master_addr"
        ) from None


def torchrun_arguments(plan: Plan, folder: str) -> list[str]:
    """torchrun's command line, its logs in `folder`. Sets OMP_NUM_THREADS where ranks are bound to cores.

    Raises ValueError where they cannot be bound.
    """
    if plan.master_port:
        where = ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
        where += ["--nnodes", str(plan.nodes), "--node-rank", str(plan.node_rank)]
        where += ["--local-addr", plan.address] if plan.address else []
    else:
        where = ["--standalone"]
    command = plan.command
    if plan.passes_local_rank:
        place = _WORDS_BEFORE_ARGUMENTS.get(command[0], 3)
        command = ["--no-python", sys.executable, "-S", str(_LOCAL_RANK), str(place), *_program(command)]
    if plan.cpus is not None:
        cores = divide(cores_of_this_host(parse_cpu_list(plan.cpus) if plan.cpus else None), plan.ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(len(cores[0])))
        lists = ";".join(",".join(str(cpu) for core in own for cpu in core) for own in cores)
        command = ["--no-python", sys.executable, "-S", str(_BIND), lists, *_program(command)]
    elif plan.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning of nine lines
    return [*where, "--nproc-per-node", str(plan.ranks), "--redirects", "3", "--log-dir", folder, *command]


def _program(command: list[str]) -> list[str]:
    """What torchrun would start for its own command."""
    return command[1:] if command[0] == "--no-python" else [sys.executable, "-u", *command]


@contextmanager
def following(folder: Path, plan: Plan, replies: Replies) -> Iterator[None]:
    """Meanwhile sends what torchrun writes of its ranks into `folder`; at the end the rest of it."""
    ended = threading.Event()
    forgotten_bytes: dict[Path, int] = {}
    decoders: dict[Path, codecs.IncrementalDecoder] = {}
    read_bytes: dict[Path, int] = {}

    def send_new() -> None:
        for local_rank in range(plan.ranks):
            for path in _logs(folder, local_rank):
                decoder = decoders.setdefault(path, codecs.getincrementaldecoder("utf-8")(errors="replace"))
                is_error = path.name == "stderr.log"
                with path.open("rb") as file:
                    file.seek(read_bytes.get(path, 0))
                    while chunk := file.read(_CHUNK):
                        read_bytes[path] = read_bytes.get(path, 0) + len(chunk)
                        replies.send(Output(plan.first_rank + local_rank, decoder.decode(chunk), is_error))
                        if read_bytes[path] - forgotten_bytes.get(path, 0) >= _FORGET_BYTES:
                            forget(path, read_bytes[path])
                            forgotten_bytes[path] = read_bytes[path]

    def follow() -> None:
        while not ended.wait(_POLL_SECONDS):
            send_new()
        send_new()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def forget(path: Path, count: int) -> None:
    """Gives the room of a file's first `count` bytes back to the disk, while a rank writes behind them."""
    before = path.stat()
    with path.open("r+b") as file:
        # Where the file system has no holes the file only grows on.
        _LIBC.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(count))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # it says when the rank wrote last


def _logs(folder: Path, local_rank: int) -> list[Path]:
    """Where torchrun puts what a rank writes: <run>/attempt_0/<local rank>/stdout.log and stderr.log."""
    return sorted(folder.glob(f"*/attempt_*/{local_rank}/std*.log"))


def _last_words(folder: Path, local_rank: int) -> float | None:
    """When a rank last wrote something; None: never.

    torchrun knows in whole seconds when a rank ended, and that is too coarse to say which one was the first.
    """
    times = [found.st_mtime for found in (path.stat() for path in _logs(folder, local_rank)) if found.st_size]
    return max(times, default=None)


def _stop(number: int, frame: object) -> NoReturn:
    """SIGTERM before torchrun has ranks; then it has a handler of its own, which ends them."""
    raise Stopped


def _end_with(commands: IO[bytes], silence: float, folder: str, is_over: threading.Event) -> None:
    """Waits for the end of the input, or `silence` s without any, then ends this process and its ranks, whatever they
    do. Sets `is_over` before."""
    number = commands.fileno()
    while select.select([number], [], [], silence or None)[0] and os.read(number, _CHUNK):
        pass
    is_over.set()
    os.kill(os.getpid(), signal.SIGTERM)
    start = time.monotonic()
    while time.monotonic() - start < _GRACE_SECONDS:
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - start > _IDLE_SECONDS and not _children():
            break  # in a call of C++ that knows no signals, such as a wait for the other hosts
    for child in _children():
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    kill_marked(folder)
    os._exit(1)


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _hello() -> Hello:
    """With the address at which the launcher found this host, unless that is this machine's for itself."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    is_known = len(connection) == 4
    is_beside_launcher = is_known and is_loopback(connection[2])
    is_sure = is_known and not is_beside_launcher
    address, launcher = (connection[2], connection[0]) if is_sure else (_address(), "")
    return Hello(address, _versions(), time.time(), is_sure, launcher, is_beside_launcher)


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    with suppress(PackageNotFoundError):  # of a build that is not installed
        found["zeropg"] = version("zeropg")
    return found


def _address() -> str:
    """The first address that `hostname -I` knows; "" without one."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10).stdout.split()
        if said:
            return said[0]
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        return "" if is_loopback(address) else address
    return ""


if __name__ == "__main__":
    sys.exit(main())
