"""Several texts as one: lines that ranks have in common are shown once.

A greedy alignment of what is in sight, in one pass and in bounded memory. A longest common subsequence would group a
few lines more, for time that grows with the square of their number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence

from zeropg.tools.logs.files import Line

SIGHT = 256  # lines of each rank that are looked at ahead
_INDENTED = re.compile(r"(\[rank\d+\]: )?\s")  # torch puts a rank before the lines of a traceback


class _Text:
    """A rank's lines: the next SIGHT ones, and where in the text each of them comes next.

    alone: lines since the last one that other ranks wrote, too. was_indented: the line before the next one.
    """

    def __init__(self, rank: int, lines: Iterator[Line]) -> None:
        self.rank = rank
        self.ahead: deque[Line] = deque()
        self.alone = 0
        self.was_indented = False
        self._lines = lines
        self._taken = 0
        self._places: dict[str, deque[int]] = {}
        self._fill()

    def take(self, is_shared: bool) -> None:
        """Goes to the next line."""
        text = self.ahead.popleft().text
        self.alone = 0 if is_shared else self.alone + 1
        self.was_indented = _INDENTED.match(text) is not None
        places = self._places[text]
        places.popleft()
        if not places:
            del self._places[text]
        self._taken += 1
        self._fill()

    def distance(self, text: str) -> int:
        """Lines before the next one that reads so; -1: none in sight does."""
        places = self._places.get(text)
        return places[0] - self._taken if places else -1

    def _fill(self) -> None:
        while len(self.ahead) < SIGHT:
            line = next(self._lines, None)
            if line is None:
                return
            self._places.setdefault(line.text, deque()).append(self._taken + len(self.ahead))
            self.ahead.append(line)


def merge(texts: Sequence[tuple[int, Iterator[Line]]]) -> Iterator[tuple[list[int], str]]:
    """Yields each line with the ranks that wrote it, ascending. Every rank's own order stays.

    texts: (rank, its lines). A line waits while another rank has the same one in sight, so that both are shown as one.
    Lines that need not wait take turns, in the order of ranks; where ranks have had nothing in common for long, the one
    at the smallest part of its text comes first. Indented lines stay with those around them. Where lines wait for each
    other the one that is farthest from its like goes alone.
    """
    open_texts = [text for text in (_Text(rank, lines) for rank, lines in sorted(texts, key=_rank)) if text.ahead]
    last: _Text | None = None
    while open_texts:
        heads: dict[str, list[_Text]] = {}
        for text in open_texts:
            heads.setdefault(text.ahead[0].text, []).append(text)
        line = next(iter(heads)) if len(heads) == 1 else _next(heads, open_texts, last)
        holders = heads[line]
        yield [text.rank for text in holders], line
        for text in holders:
            text.take(len(holders) > 1)
        last = holders[0]
        open_texts = [text for text in open_texts if text.ahead]


def _next(heads: dict[str, list[_Text]], texts: list[_Text], last: _Text | None) -> str:
    distances = {line: max(text.distance(line) for text in texts) for line in heads}
    free = [line for line, distance in distances.items() if distance == 0]  # no other rank has it later
    if not free:
        return max(distances, key=distances.__getitem__)
    for line in free:
        if heads[line][0] is last and (last.was_indented or _INDENTED.match(line)):
            return line
    if any(heads[line][0].alone >= SIGHT for line in free):
        return min(free, key=lambda line: heads[line][0].ahead[0].place)
    return min(free, key=lambda line: heads[line][0].alone)


def _rank(entry: tuple[int, Iterator[Line]]) -> int:
    return entry[0]
