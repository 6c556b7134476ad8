"""Who failed first: by the run's own record, else by the logs alone."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeropg.tools.logs.files import Line, RankFile
from zeropg.tools.run.record import RankFailure, Record

LAST_LINES = 30
_FATAL = re.compile(
    r"Traceback \(most recent call last\):"
    r"|Fatal Python error:"
    r"|terminate called (after throwing|without an active)"
    r"|Segmentation fault|Bus error|Floating point exception|Illegal instruction"
    r"|\bSIG(SEGV|BUS|FPE|ILL|ABRT|KILL)\b"
    r"|Caught signal \d+"
)


@dataclass
class Symptoms:
    """Of one rank's log. first: its first traceback or fatal line; None: it has none. last: its last lines."""

    file: RankFile
    first: Line | None
    modified_ns: int
    last: deque[str] = field(default_factory=deque)


def symptoms(file: RankFile, lines: int = LAST_LINES) -> Symptoms:
    """Reads the whole log, and keeps the last `lines` of it. Raises OSError."""
    found = Symptoms(file, None, file.path.stat().st_mtime_ns, deque(maxlen=lines))
    for line in file.lines(is_final=True):
        if found.first is None and _FATAL.search(line.text):
            found.first = line
        found.last.append(line.text)
    return found


def report(record: Record | None, ranks: Sequence[Symptoms]) -> tuple[bool, list[str]]:
    """Returns whether a rank has failed, and what to say of it. ranks: all of them.

    A traceback of a run that ended well was caught by the program, and after Ctrl-C every rank may have one: neither is
    a failure.
    """
    if record is None or record.failures is None:
        return _by_logs(record.hosts if record is not None else None, ranks)
    if not record.failures:
        end = f"was stopped by {record.stopped}" if record.stopped else "ended well"
        caught = [] if record.stopped else [one for one in ranks if one.first is not None]
        lines = [f"  rank {one.file.rank} went on after {_where(one)}" for one in caught]
        return False, [f"no rank failed: the run {end}", *lines]
    cause, *others = record.failures
    lines = [f"{_name(cause)} failed first: {cause.how}"]
    lines += [f"  then {_name(other)}: {other.how}" for other in others]
    return True, lines + [line for one in ranks if one.file.rank == cause.rank for line in _details(one)]


def _by_logs(hosts: list[str] | None, ranks: Sequence[Symptoms]) -> tuple[bool, list[str]]:
    ill = [one for one in ranks if one.first is not None]
    if not ill:
        return False, ["no rank wrote a traceback or a fatal signal"]
    cause = min(ill, key=lambda one: one.modified_ns)  # the others only lost a peer, and wrote on after it had ended
    host = f" on {hosts[cause.file.rank]}" if hosts else ""
    why = ", as its log was the first to end" if len(ill) > 1 else ""
    lines = [f"rank {cause.file.rank}{host} failed first{why}"]
    lines += [f"  also rank {one.file.rank}: {_where(one)}" for one in ill if one is not cause]
    return True, lines + _details(cause)


def _name(failure: RankFailure) -> str:
    return failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"


def _where(rank: Symptoms) -> str:
    assert rank.first is not None
    return f"{rank.file.path}:{rank.first.number}: {rank.first.text.strip()}"


def _details(rank: Symptoms) -> list[str]:
    lines = [f"  {_where(rank)}"] if rank.first is not None else []
    if not rank.last:
        return [*lines, f"  {rank.file.path} is empty"]
    return [*lines, f"--- last lines of rank {rank.file.rank}:", *rank.last, "---"]
