"""What ranks write: a file for each rank, lines with the rank's number on the console, and the last lines."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import IO

_TAIL_LINES = 30
_LONGEST_LINE = 1 << 16  # characters; longer ones are cut in several


class RankOutput:
    """Takes text as it comes, and shows whole lines.

    A line that ends with a carriage return is a progress bar's: on a terminal the next one takes its place, and
    elsewhere it is left out. Files get all text as it is.
    """

    def __init__(self, world_size: int, folder: Path | None, console: IO[str] | None = None) -> None:
        """folder: of the files `rank0.log` and so on, which are written anew; None: no files."""
        self._width = len(str(world_size - 1))
        self._console = console if console is not None else sys.stdout
        self._shows_bars = self._console.isatty()
        self._pending = [""] * world_size
        self._tails: list[deque[str]] = [deque(maxlen=_TAIL_LINES) for _ in range(world_size)]
        self._files: list[IO[str]] = []
        self._paths: list[Path] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._paths = [folder / f"rank{rank}.log" for rank in range(world_size)]
            self._files = [path.open("w", encoding="utf-8", errors="replace", newline="") for path in self._paths]

    def write(self, rank: int, text: str) -> None:
        if self._files:
            self._files[rank].write(text)
            self._files[rank].flush()
        whole = (self._pending[rank] + text).replace("\r\n", "\n")
        *lines, rest = whole.split("\n")
        for line in lines:
            self._line(rank, line)
        *bars, rest = rest.split("\r")
        if bars and not rest:
            rest = bars.pop() + "\r"  # which a line's end may follow
        if bars and self._shows_bars:
            print(f"\r{self._prefix(rank)}{bars[-1]}", end="\x1b[K\r", file=self._console, flush=True)
        while len(rest) > _LONGEST_LINE:
            self._line(rank, rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._pending[rank] = rest

    def close(self) -> None:
        """Shows lines without an end, and closes the files."""
        for rank, rest in enumerate(self._pending):
            if rest:
                self._line(rank, rest)
        self._pending = [""] * len(self._pending)
        for file in self._files:
            file.close()

    def tail(self, rank: int) -> list[str]:
        """The rank's last lines."""
        return list(self._tails[rank])

    def path(self, rank: int) -> Path | None:
        return self._paths[rank] if self._paths else None

    def _line(self, rank: int, line: str) -> None:
        shown = line.rpartition("\r")[2]  # what a terminal would show
        self._tails[rank].append(shown)
        print(f"{self._prefix(rank)}{shown}", file=self._console, flush=True)

    def _prefix(self, rank: int) -> str:
        return f"[rank {rank:{self._width}}] "
