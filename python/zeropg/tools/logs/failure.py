"""Which rank failed first, and what it said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from zeropg.tools.logs.folder import lines_of

_BEGIN = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, where a rank's exception is not caught
_MOST_LINES = 20


class Traceback(NamedTuple):
    """The first of a rank, with those that are chained to it; without torch's prefixes."""

    rank: int
    lines: list[str]

    @property
    def last_lines(self) -> list[str]:
        return self.lines[-_MOST_LINES:]


def first_traceback(logs: dict[int, Path]) -> Traceback | None:
    """That of the rank whose log ended first: others fail by its failure, and say so later. None where nobody has one.

    Lines carry no times, so this goes by the files' own (of equal ones the lowest rank's).
    """
    for rank in sorted(logs, key=lambda rank: (logs[rank].stat().st_mtime_ns, rank)):
        if lines := _traceback(logs[rank]):
            return Traceback(rank, lines)
    return None


def _traceback(path: Path) -> list[str]:
    found: list[str] = []
    has_ended = False
    for raw in lines_of(path):
        line = _PREFIX.sub("", raw)
        if not found:
            if line.strip() == _BEGIN:
                found.append(line.strip())
        elif not has_ended:
            found.append(line)
            # The exception's own line ends it; `+` and `|` draw groups of exceptions.
            has_ended = bool(line) and line[0] not in " +|"
        elif line in _CHAINED or not line or line == _BEGIN:
            found.append(line)
            has_ended = line != _BEGIN
        else:
            break
    while found and not found[-1]:
        found.pop()
    return found
