"""What ranks write: a file for each rank, lines with the rank's number on the console, and the last lines."""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from pathlib import Path
from typing import IO

_TAIL_LINES = 30
_LONGEST_LINE = 1 << 16  # characters; longer ones are cut in several


class RankOutput:
    """Takes text as it comes, and shows whole lines: standard output on ours, and standard error on ours.

    A line that ends with a carriage return is a progress bar's: on a terminal the next one takes its place, and
    elsewhere it is left out. Files get all text as it is, of both; only where one breaks into a line of the other
    there is a line's end between.

    is_unread: nobody reads our standard output any more (`| head`). A terminal that is closed is no such thing: what is
    said then goes to the files alone.
    """

    def __init__(
        self, world_size: int, folder: Path | None, console: IO[str] | None = None, errors: IO[str] | None = None
    ) -> None:
        """folder: of the files `rank0.log` and so on, which are written anew; None: no files."""
        self.is_unread = False
        self._width = len(str(world_size - 1))
        self._consoles = (console or sys.stdout, errors or console or sys.stderr)
        # Of each rank's standard output and standard error: the line that has not ended.
        self._pending = [["", ""] for _ in range(world_size)]
        self._open_lines: list[bool | None] = [None] * world_size  # in files: whose they are, standard error's or not
        self._tails: list[deque[str]] = [deque(maxlen=_TAIL_LINES) for _ in range(world_size)]
        self._files: list[IO[str]] = []
        self._paths: list[Path] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._paths = [folder / f"rank{rank}.log" for rank in range(world_size)]
            self._files = [path.open("w", encoding="utf-8", errors="replace", newline="") for path in self._paths]

    def write(self, rank: int, text: str, is_error: bool = False) -> None:
        self._write_file(rank, text, is_error)
        whole = (self._pending[rank][is_error] + text).replace("\r\n", "\n")
        *lines, rest = whole.split("\n")
        for line in lines:
            self._line(rank, line, is_error)
        *bars, rest = rest.split("\r")
        if bars and not rest:
            rest = bars.pop() + "\r"  # which a line's end may follow
        if bars and self._consoles[is_error].isatty():
            self._say(f"\r{self._prefix(rank)}{bars[-1]}\x1b[K\r", is_error)
        while len(rest) > _LONGEST_LINE:
            self._line(rank, rest[:_LONGEST_LINE], is_error)
            rest = rest[_LONGEST_LINE:]
        self._pending[rank][is_error] = rest

    def close(self) -> None:
        """Shows lines without an end, and closes the files."""
        for rank, pending in enumerate(self._pending):
            for is_error in (False, True):
                rest, pending[is_error] = pending[is_error], ""
                if rest:
                    self._line(rank, rest, is_error)
        for file in self._files:
            file.close()

    def tail(self, rank: int) -> list[str]:
        """The rank's last lines."""
        return list(self._tails[rank])

    def path(self, rank: int) -> Path | None:
        return self._paths[rank] if self._paths else None

    def _write_file(self, rank: int, text: str, is_error: bool) -> None:
        if not self._files or not text:
            return
        if self._open_lines[rank] not in (None, is_error):
            self._files[rank].write("\n")
        try:
            self._files[rank].write(text)
            self._files[rank].flush()
        except OSError as error:  # a full disk is no reason to stop ranks
            go_on_without(self._files[rank])
            self._say(f"zeropg run: {self._paths[rank]} ends here: {error}\n", True)
        self._open_lines[rank] = None if text.endswith("\n") else is_error

    def _line(self, rank: int, line: str, is_error: bool) -> None:
        shown = line.rpartition("\r")[2]  # what a terminal would show
        self._tails[rank].append(shown)
        self._say(f"{self._prefix(rank)}{shown}\n", is_error)

    def _say(self, text: str, is_error: bool) -> None:
        console = self._consoles[is_error]
        try:
            console.write(text)
            console.flush()
        except OSError as error:
            self.is_unread = self.is_unread or (error.errno == errno.EPIPE and not is_error)
            go_on_without(console)

    def _prefix(self, rank: int) -> str:
        return f"[rank {rank:{self._width}}] "


def go_on_without(console: IO[str]) -> None:
    """Lets what is written to this console or file vanish from now on, also what waits in its buffer."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, console.fileno())
    os.close(nothing)
