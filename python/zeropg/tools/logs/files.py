"""The files of a folder of logs, and their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zeropg.tools.run.record import Record

_NAME = re.compile(r"rank(\d+)\.log")
_LONGEST_LINE = 1 << 16  # bytes; longer ones are cut in several


@dataclass(frozen=True)
class Line:
    """number: in its file, from 1. place: how far into what was read at once it ends, 0 to 1."""

    text: str
    number: int
    place: float


@dataclass
class RankFile:
    """A rank's log, which may still grow. position: the byte behind the last line that was given out."""

    rank: int
    path: Path
    position: int = 0
    lines_read: int = field(default=0)

    def lines(self, is_final: bool) -> Iterator[Line]:
        """The lines since the last call, as a terminal shows them: of a progress bar the last state.

        is_final: also a last line without an end, which otherwise is left to the next call. A file that has become
        shorter was written anew, and is read from its beginning. Raises OSError.
        """
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self.position:
                self.position = self.lines_read = 0
            begin = self.position
            file.seek(begin)
            while self.position < size and (line := file.readline(_LONGEST_LINE)):
                if not is_final and not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                    return
                self.position += len(line)
                self.lines_read += 1
                yield Line(_shown(line), self.lines_read, (self.position - begin) / (size - begin))


def _shown(line: bytes) -> str:
    return line.decode("utf-8", "replace").removesuffix("\n").rstrip("\r").rpartition("\r")[2]


def rank_files(folder: Path, record: Record | None) -> list[RankFile]:
    """In the order of ranks. Files of ranks that the record does not know are left over from a larger run: not these.

    Raises OSError where the folder cannot be read.
    """
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [RankFile(rank, path) for rank, path in sorted(found) if record is None or rank < len(record.hosts)]


def parse_ranks(text: str) -> set[int]:
    """ "0,2-3" -> {0, 2, 3}. Raises ValueError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} names no ranks; expected numbers and ranges, such as 0,2-3")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def format_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5". ranks: ascending."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)
