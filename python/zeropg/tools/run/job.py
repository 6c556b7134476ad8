"""One run over all hosts: reach them, start, show what ranks write, and end everything when one of them fails."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from zeropg.tools.run.hosts import Host
from zeropg.tools.run.launchers import remedy
from zeropg.tools.run.messages import BEAT_SECONDS, Done, Failed, Hello, Output, Plan, from_line, to_line
from zeropg.tools.run.rank_output import RankOutput, go_on_without

_GATHER_SECONDS = 1.5  # for other hosts to say that they failed, too: maybe earlier
_STOP_SECONDS = 45.0  # longer than hosts take to kill what ignores SIGTERM
_CLOSE_SECONDS = 2.0  # for a process to end after SIGTERM
_WORDS_SECONDS = 1.0  # for the last words of a process that has ended; a master of ssh's may keep the pipe
_SAID_LINES = 20
_MOST_EVENTS = 1000  # that wait for their turn
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Gone:
    """The process that reaches a host has ended. exit_code: its own."""

    exit_code: int


@dataclass(frozen=True)
class Signalled:
    number: int


@dataclass
class Node:
    """A host, and the process here that reaches it: a run of `program`. said: its last lines on standard error."""

    host: Host
    first_rank: int
    program: str
    process: subprocess.Popen[bytes]
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_SAID_LINES))
    hello: Hello | None = None
    clock_offset: float = 0.0  # seconds that this machine's clock is ahead of the host's
    is_done: bool = False
    has_ended: bool = False


@dataclass(frozen=True)
class Failure:
    """at: seconds since the epoch by this machine's clock: when the rank had written its last words."""

    node: Node
    rank: int | None
    exit_code: int
    at: float
    why: str


class Unreachable(Exception):
    """Some hosts cannot be used; nothing has been started."""


class Stopped(Exception):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Job:
    """The processes of a run. Leaving the `with` ends all of them."""

    def __init__(
        self, hosts: Sequence[Host], command: Callable[[Host], list[str]], environment: Mapping[str, str]
    ) -> None:
        """command: how to start the process on a host. environment: of the processes here that do it."""
        # A SimpleQueue, since a signal may come while this thread holds the lock of another kind.
        self._events: queue.SimpleQueue[tuple[Node | None, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MOST_EVENTS)  # a console that is slow makes ranks wait, not memory grow
        self.nodes: list[Node] = []
        self._has_stopped = threading.Event()
        self._hosts = hosts
        self._command = command
        self._environment = environment

    def __enter__(self) -> Job:
        # What is ignored stays so: SIGHUP under nohup, SIGINT in the background of a script.
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._on_signal) for number in heeded}
        first_rank = 0
        try:
            for host in self._hosts:
                # In a session of its own: Ctrl-C is for this process, which then ends the others in order.
                pipe, command = subprocess.PIPE, self._command(host)
                process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment, start_new_session=True
                )
                node = Node(host, first_rank, command[0], process)
                self.nodes.append(node)
                first_rank += len(host.slots)
                words = threading.Thread(target=self._follow_words, args=(node,), daemon=True)
                messages = threading.Thread(target=self._follow_messages, args=(node, words), daemon=True)
                words.start()
                messages.start()
        except OSError as error:
            self.close()
            raise Unreachable(f"{host.name} cannot be reached: {error.filename}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs here. Hosts end their ranks themselves when their input ends, and nothing waits."""
        for node in self.nodes:
            with contextlib.suppress(OSError):
                _opened(node.process.stdin).close()
            with contextlib.suppress(ProcessLookupError):
                if node.process.poll() is None:
                    os.killpg(node.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(_CLOSE_SECONDS)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def reach(self, seconds: float) -> None:
        """Waits until all hosts have said hello. Raises Unreachable with a sentence for each that has not."""
        self._greet(time.monotonic() + seconds)
        if any(node.has_ended for node in self.nodes):
            deadline = time.monotonic() + _GATHER_SECONDS  # maybe others cannot be reached, either
            while time.monotonic() < deadline and not all(node.has_ended or node.hello for node in self.nodes):
                self._greet(deadline)
        lost = [f"{node.host.name} cannot be reached: {_how_it_ended(node)}" for node in self.nodes if node.has_ended]
        late = [node.host.name for node in self.nodes if node.hello is None]
        if lost or late:
            slow = f"{late[0]} did not answer within {seconds:g} s (--connect_timeout)" if late else ""
            raise Unreachable("; ".join(lost) or slow)
        hellos = [(node, node.hello) for node in self.nodes if node.hello is not None]
        for name in dict.fromkeys(name for _, hello in hellos for name in hello.versions):
            kinds = {hello.versions[name]: node for node, hello in reversed(hellos) if name in hello.versions}
            if len(kinds) > 1:
                found = " and ".join(f"{version} on {node.host.name}" for version, node in kinds.items())
                raise Unreachable(f"hosts have different versions of {name}: {found}; install one on all of them")

    def _greet(self, deadline: float) -> None:
        """Takes hellos until all hosts have said it, or the next one has ended without."""
        for node, event in self._until(deadline):
            if isinstance(event, Hello):
                node.hello, node.clock_offset = event, time.time() - event.clock
            elif isinstance(event, Gone):
                node.has_ended = True
                return
            if all(one.hello is not None for one in self.nodes):
                return

    def run(self, plans: Sequence[Plan], output: RankOutput) -> list[Failure]:
        """Runs a plan on each host until all are done, or until the first failure; then ends all ranks.

        Returns the failures, the first one first. Raises Stopped after a signal; a second one ends everything at once.
        """
        for node, plan in zip(self.nodes, plans, strict=True):
            with contextlib.suppress(BrokenPipeError):  # its end comes as an event
                _opened(node.process.stdin).write(to_line(plan))
                _opened(node.process.stdin).flush()
        threading.Thread(target=self._beat, daemon=True).start()
        failures: list[Failure] = []
        try:
            self._watch(output, failures, None)
        finally:
            self._stop(output)
            output.close()
        return sorted(failures, key=lambda failure: failure.at)

    def _watch(self, output: RankOutput, failures: list[Failure], deadline: float | None) -> None:
        """Handles events until all hosts are done, or a little longer than the first failure, or to the deadline."""
        for node, event in self._until(deadline):
            if isinstance(event, Output):
                _show(node, event, output)
                if output.is_unread:
                    raise Stopped(signal.SIGPIPE)
            elif isinstance(event, Failed):
                failures.append(_failure(node, event))
                node.is_done = True
            elif isinstance(event, Done):
                node.is_done = True
            elif isinstance(event, Gone):
                if not node.is_done:
                    why = f"the connection is gone, {_how_it_ended(node)}"
                    failures.append(Failure(node, None, event.exit_code, time.time(), why))
                node.is_done = node.has_ended = True
            if all(one.is_done for one in self.nodes):
                return
            if failures and deadline is None:
                return self._watch(output, failures, time.monotonic() + _GATHER_SECONDS)

    def _stop(self, output: RankOutput) -> None:
        """Tells all hosts to end, waits for them, and shows what ranks still say."""
        self._has_stopped.set()
        for node in self.nodes:
            with contextlib.suppress(BrokenPipeError):
                _opened(node.process.stdin).close()
        waiting = [node for node in self.nodes if not node.has_ended]
        for node, event in self._until(time.monotonic() + _STOP_SECONDS) if waiting else ():
            if isinstance(event, Output):
                _show(node, event, output)
            elif isinstance(event, Gone):
                node.has_ended = True
            if all(one.has_ended for one in waiting):
                return

    def _until(self, deadline: float | None) -> Iterator[tuple[Node, Any]]:
        """Events as they come, until the deadline. Raises Stopped for a signal."""
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            try:
                node, event = self._events.get(timeout=left)
            except queue.Empty:
                return
            if node is None:
                raise Stopped(event.number)
            self._room.release()
            yield node, event

    def _beat(self) -> None:
        """Tells the hosts that this process and the network live."""
        while not self._has_stopped.wait(BEAT_SECONDS):
            for node in self.nodes:
                with contextlib.suppress(OSError, ValueError):  # closed
                    _opened(node.process.stdin).write(b"\n")
                    _opened(node.process.stdin).flush()

    def _on_signal(self, number: int, frame: object) -> None:
        self._events.put((None, Signalled(number)))

    def _follow_messages(self, node: Node, words: threading.Thread) -> None:
        shown: deque[str] = deque(maxlen=_SAID_LINES)
        for line in _opened(node.process.stdout):
            try:
                event = from_line(line)
            except ValueError:  # of the shell there, such as a greeting
                shown.append(line.decode(errors="replace").rstrip())
                continue
            self._room.acquire()
            self._events.put((node, event))
        exit_code = node.process.wait()
        words.join(_WORDS_SECONDS)
        if not node.said:
            node.said.extend(line for line in shown if line)
        self._room.acquire()
        self._events.put((node, Gone(exit_code)))

    def _follow_words(self, node: Node) -> None:
        """torchrun's own words, and those of the shell."""
        for line in _opened(node.process.stderr):
            text = line.decode(errors="replace").rstrip()
            node.said.append(text)
            if node.hello is not None:
                say(f"[{node.host.name}] {text}")


def say(text: str) -> None:
    """Writes a line to standard error, where there is still somebody."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        go_on_without(sys.stderr)


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _is_of(node: Node, rank: int) -> bool:
    """Whether a host may speak of a rank: messages come from elsewhere."""
    return node.first_rank <= rank < node.first_rank + len(node.host.slots)


def _show(node: Node, event: Output, output: RankOutput) -> None:
    if _is_of(node, event.rank):
        output.write(event.rank, event.text, event.is_error)


def _failure(node: Node, event: Failed) -> Failure:
    rank = event.rank if event.rank is not None and _is_of(node, event.rank) else None
    return Failure(node, rank, event.exit_code, event.since + node.clock_offset, event.why)


def _how_it_ended(node: Node) -> str:
    said = [line for line in node.said if line.strip()]
    # srun ends with a line about the exit code; before it stands why.
    last = next((line for line in reversed(said) if not line.startswith("srun: ")), said[-1] if said else "")
    ended = f"{node.program} ended with {node.process.poll()}" + (f" and said: {last}" if last else "")
    helps = remedy(node.host, last)
    return f"{ended} ({helps})" if helps else ended
