"""`merged`: the lines of all ranks in one order, what several of them say once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """A line, and the ranks that say it at this place, ascending."""

    ranks: tuple[int, ...]
    text: str


class _Reader:
    """One rank's lines, of which the next `window` are looked at."""

    def __init__(self, rank: int, lines: Iterable[str], window: int, ahead: dict[str, dict[int, int]]) -> None:
        self.rank = rank
        self._source = iter(lines)
        self._next: deque[str] = deque()
        self._ahead = ahead
        for _ in range(window):
            self._read()

    @property
    def head(self) -> str | None:
        return self._next[0] if self._next else None

    def advance(self) -> None:
        text = self._next.popleft()
        counts = self._ahead[text]
        counts[self.rank] -= 1
        if counts[self.rank] == 0:
            del counts[self.rank]
            if not counts:
                del self._ahead[text]
        self._read()

    def _read(self) -> None:
        for text in self._source:
            self._next.append(text)
            counts = self._ahead.setdefault(text, {})
            counts[self.rank] = counts.get(self.rank, 0) + 1
            return


def merged(logs: Mapping[int, Iterable[str]], window: int = 1000) -> Iterator[Line]:
    """Yields each line of each rank once, in the order of its rank, and a line that several ranks say once for all.

    Lines carry no times. So a line waits while another rank says the same one within its next `window` lines: what that
    rank says before comes first. Where ranks say two lines in opposite orders, that of the lowest rank counts.
    """
    ahead: dict[str, dict[int, int]] = {}  # line: how often each rank says it within its window
    readers = [_Reader(rank, logs[rank], window, ahead) for rank in sorted(logs)]
    while waiting := [reader for reader in readers if reader.head is not None]:
        heads: dict[str, list[_Reader]] = {}
        for reader in waiting:
            heads.setdefault(str(reader.head), []).append(reader)
        ready = (text for text, having in heads.items() if len(having) == len(ahead[text]))
        text = next(ready, str(waiting[0].head))
        yield Line(tuple(reader.rank for reader in heads[text]), text)
        for reader in heads[text]:
            reader.advance()


def shown_ranks(ranks: Iterable[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"; ascending."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
