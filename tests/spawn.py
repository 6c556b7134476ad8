"""Runs a function on several ranks, each a real process with a c10d process group.

    def add(value):
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(3, add, 10) == [33, 33, 33]

The function must stand at the top of its module; arguments and results are pickled. Ranks are forked from one server
that has imported torch and zeropg (0.1 s instead of 3 s each), so a start is cheap; `RankPool` saves even that, and the
set-up of the group, over several calls. Whatever happens, no process outlives the call (the pool).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 10.0  # for the other ranks to fail or finish by themselves once one rank has failed
DUMP_SECONDS = 5.0  # for a rank to write its stacks
TAIL_CHARACTERS = 6000  # of a rank's output that an error quotes


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not finish. `.failures` maps each such rank to its text."""

    def __init__(self, world_size: int, failures: dict[int, str]) -> None:
        super().__init__(f"{len(failures)} of {world_size} ranks failed\n" + "\n".join(failures.values()))
        self.failures = failures


@dataclass(frozen=True)
class Place:
    """Where the ranks of a pool run: this machine. tests/lab has another, with simulated hosts."""

    address: str = "127.0.0.1"  # of the store

    def enter(self, rank: int) -> None:
        """Called first in the process of each rank."""

    def open_store(self, timeout: float) -> Any:
        """A store that outlives every rank, with its `port`; `close_store` ends it."""
        import torch.distributed as dist

        return dist.TCPStore(self.address, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)

    def close_store(self, store: Any) -> None:
        """A TCPStore ends with its last reference."""

    def environment(self, rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}


THIS_MACHINE = Place()


@dataclass(frozen=True)
class SeparateHosts(Place):
    """This machine, but rank r says that it is on host `hosts[r]`: ranks of different hosts share no memory."""

    hosts: tuple[int, ...] = ()

    def environment(self, rank: int) -> dict[str, str]:
        return {**super().environment(rank), "ZEROPG_HOST_ID": f"host-{self.hosts[rank]}"}


@dataclass(frozen=True)
class SeparateDomains(Place):
    """This machine, but rank r says that its CPUs are in domain `domains[r]`."""

    domains: tuple[int, ...] = ()

    def environment(self, rank: int) -> dict[str, str]:
        return {**super().environment(rank), "ZEROPG_DOMAIN_ID": f"domain-{self.domains[rank]}"}


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    backend: str | None = "zeropg",
    expect_death: Collection[int] = (),
    fresh: bool = False,
    place: Place = THIS_MACHINE,
) -> list[Any]:
    """Calls function(*args) on ranks 0..world_size-1 and returns the list of their results.

    backend: for init_process_group, which is done before the call; None leaves it to the function.
    env: set in every rank before the group is made.
    timeout: seconds for the whole call; then every rank's stacks are dumped into the error and all are killed.
    expect_death: ranks whose death (a signal) is part of the test; their result is None.
    fresh: start new interpreters instead of forking, for variables that torch reads when it is loaded.
    place: where the ranks run; HostsPlace(lab) of tests/lab spreads them over simulated hosts.
    """
    with RankPool(world_size, backend=backend, env=env, fresh=fresh, place=place) as pool:
        return pool.run(function, *args, timeout=timeout, expect_death=expect_death)


class RankPool:
    """The same processes and default group for several calls of `run`; after a failure the next call starts anew."""

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "zeropg",
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        place: Place = THIS_MACHINE,
    ) -> None:
        self.world_size = world_size
        self._place = place
        self._backend = backend
        self._env = dict(env or {})
        # `fork` is the one method that must not be used: pytest's process has threads.
        self._context = multiprocessing.get_context("spawn" if fresh else "forkserver")
        if not fresh:
            # DTensor and dynamo are what zeropg and the first optimizer import: 1.4 s of CPU per rank otherwise.
            modules = ["torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo", "tests.preloaded"]
            self._context.set_forkserver_preload(modules)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, expect_death: Collection[int] = ()
    ) -> list[Any]:
        """As run_ranks, on this pool's processes."""
        deadline = time.monotonic() + timeout
        try:
            if not self._processes:
                self._start(timeout)
            self._calls += 1
            request = pickle.dumps((self._calls, timeout, function, args))
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # died since its last call: `_collect`
                    connection.send_bytes(request)
            results, failures = self._collect(deadline, frozenset(expect_death))
        except BaseException:
            self._kill()
            raise
        if failures or expect_death:
            self._kill()
        if failures:
            raise RanksFailed(self.world_size, failures)
        return results

    def close(self, timeout: float = 30) -> None:
        """Destroys the groups and ends the processes; raises if one crashes or hangs while doing so."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + timeout
        failures = {}
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                failures[rank] = self._describe(rank, f"did not exit within {timeout:.0f} s of teardown", dump=True)
            elif process.exitcode != 0:
                failures[rank] = self._describe(rank, f"ended with exit code {process.exitcode} in teardown")
        self._kill()
        if failures:
            raise RanksFailed(self.world_size, failures)

    def _start(self, timeout: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zeropg-ranks-")
        self._store = self._place.open_store(timeout)
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            settings = (rank, self.world_size, self._backend, self._store.port, self._env, self._output(rank))
            process = self._context.Process(target=_serve, args=(theirs, self._place, *settings), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float, expect_death: frozenset[int]) -> tuple[list[Any], dict[int, str]]:
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        waiting = set(range(self.world_size))
        while waiting:
            # The process too: a child that it forked may hold its end of the connection open after its death.
            signs = {self._connections[rank]: rank for rank in waiting}
            signs |= {self._processes[rank].sentinel: rank for rank in waiting}
            ready = wait(list(signs), max(0.0, deadline - time.monotonic()))
            if not ready:
                why = f"did not finish; the first to fail: rank {next(iter(failures))}" if failures else "timed out"
                for rank in sorted(waiting):
                    failures[rank] = self._describe(rank, why, dump=True)
                break
            for rank in sorted({signs[sign] for sign in ready}):  # type: ignore[index]
                waiting.remove(rank)
                answer = self._answer(rank)
                if answer is None:
                    self._processes[rank].join(5)
                    if rank not in expect_death:
                        failures[rank] = self._describe(rank, f"died with exit code {self._processes[rank].exitcode}")
                elif answer[0]:
                    failures[rank] = self._describe(rank, f"raised\n{answer[1]}")
                else:
                    results[rank] = answer[1]
                if rank in failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failures

    def _answer(self, rank: int) -> tuple[bool, Any] | None:
        """Whether the call raised, and its text or result; None when the rank died without an answer."""
        try:
            if not self._connections[rank].poll():
                return None
            answer: tuple[bool, Any] = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            return None
        return answer

    def _describe(self, rank: int, what: str, dump: bool = False) -> str:
        if dump and self._processes[rank].is_alive():
            self._dump_stacks(rank)
        output = Path(self._output(rank))
        tail = output.read_text(errors="replace")[-TAIL_CHARACTERS:].rstrip() if output.exists() else ""
        return f"--- rank {rank} {what}" + (f"\n--- rank {rank} had written:\n{tail}" if tail else "")

    def _dump_stacks(self, rank: int) -> None:
        """Returns when they are in the rank's output, which takes a while on a busy machine, or when none come."""
        output = Path(self._output(rank))
        begin = output.stat().st_size if output.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)  # to faulthandler
        deadline = time.monotonic() + DUMP_SECONDS
        known = b""
        while time.monotonic() < deadline and self._processes[rank].is_alive():
            time.sleep(0.2)
            new = output.read_bytes()[begin:] if output.exists() else b""
            if new == known and b"most recent call first" in new:
                return
            known = new

    def _output(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"rank{rank}.txt")

    def _kill(self) -> None:
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # the rank's own children too
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        if self._processes:
            self._folder.cleanup()
            self._place.close_store(self._store)
            del self._store
        self._processes, self._connections = [], []


def _serve(
    connection: Connection,
    place: Place,
    rank: int,
    world_size: int,
    backend: str | None,
    port: int,
    env: dict[str, str],
    output: str,
) -> None:
    """The life of one rank: runs what comes through the connection until told to stop."""
    os.setpgid(0, 0)
    place.enter(rank)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (for the life of the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)})
    os.environ.update({"MASTER_ADDR": place.address, "MASTER_PORT": str(port)})
    os.environ.update(place.environment(rank))
    os.environ.update(env)

    import torch.distributed as dist

    while (request := pickle.loads(connection.recv_bytes())) is not None:
        call, timeout, function, args = request
        try:
            if backend is not None and not dist.is_initialized():
                store = dist.TCPStore(place.address, port, None, False, timedelta(seconds=timeout))
                _init_process_group(backend, rank, world_size, store, call, timeout)
            answer = pickle.dumps((False, function(*args)))
        except BaseException:
            answer = pickle.dumps((True, traceback.format_exc()))
        connection.send_bytes(answer)
    if dist.is_initialized():
        gc.collect()  # models in cycles hold groups; gloo's would live on, and their threads outlive the interpreter
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """Nothing outlives a killed pytest. (PR_SET_PDEATHSIG watches the fork server, which lives as long as a rank.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _init_process_group(backend: str, rank: int, world_size: int, store: Any, call: int, timeout: float) -> None:
    import torch.distributed as dist

    if "zeropg" in backend:
        import zeropg  # noqa: F401  (a build folder on PYTHONPATH has no entry points)
    # Shorter than the caller's patience, so that the group's own error is seen, which says more than a kill.
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"call{call}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(1.0, 0.7 * timeout)),
    )
