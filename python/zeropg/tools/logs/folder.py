"""The files of `python -m zeropg run --log_dir`, and what comes to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"rank(\d+)\.log")


class LogError(Exception):
    """There is nothing to show; says why."""


def logs_in(directory: Path, wanted: list[int] | None) -> dict[int, Path]:
    """The file of each rank, or of the wanted ones. Raises LogError where there are none, or not all wanted."""
    if not directory.is_dir():
        raise LogError(f"{directory} is no directory; expected what --log_dir of python -m zeropg run was")
    found = {int(name[1]): path for path in directory.iterdir() if (name := _NAME.fullmatch(path.name))}
    if not found:
        raise LogError(f"{directory} has no rank0.log; expected what --log_dir of python -m zeropg run was")
    if missing := sorted(set(wanted or ()) - set(found)):
        raise LogError(f"{directory} has no log of rank {missing[0]}, only of {', '.join(map(str, sorted(found)))}")
    return {rank: found[rank] for rank in sorted(found if wanted is None else wanted)}


def lines_of(path: Path) -> Iterator[str]:
    """Yields the lines as a terminal would show them: of a progress bar the last state."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield _as_shown(line)


def _as_shown(line: str) -> str:
    return line.rstrip().rpartition("\r")[2]


class Growing:
    """A file that somebody writes to: `new_lines` are the whole ones since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                if self._offset > file.seek(0, 2):  # another run writes it anew
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_as_shown(line.decode(errors="replace")) for line in lines]
