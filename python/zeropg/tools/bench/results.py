"""What a suite's file holds: a header, and a row per case and peer. benchmarks/README.md describes the form."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DECIMALS = 3  # nanoseconds of microseconds
_DIGITS = 6  # significant ones, of what is small


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest of the values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratios(measured: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Round by round `measured / baseline`: what a slow minute did to both cancels out."""
    return Spread.of([a / b for a, b in zip(measured, baseline, strict=True)])


@dataclass(frozen=True)
class Row:
    """The figures of one peer in one case. `parameters` say what else was measured, e.g. bytes and dtype.

    A figure's name ends in its unit, or says of what it is a share or multiple. It is a Spread where rounds were timed.
    """

    case: str
    peer: str
    figures: dict[str, Spread | float]
    parameters: dict[str, str | int] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """The figure itself, or the middle of its spread. Raises KeyError where the row has no such figure."""
        figure = self.figures[name]
        return figure.median if isinstance(figure, Spread) else figure


def write_results(path: Path, suite: str, rows: Iterable[Row], header: dict[str, Any]) -> None:
    """Writes a suite's file: JSON with one line per fact of the header and one per row, so that diffs stay small."""
    facts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in ({"suite": suite} | header).items()]
    lines = [json.dumps(_as_json(row)) for row in rows]
    text = '{\n"header": {\n' + ",\n".join(facts) + '\n},\n"rows": [\n' + ",\n".join(lines) + "\n]\n}\n"
    write_whole(path, text)


def read_results(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The header, with the suite's name in it, and the rows of a file of `write_results`.

    Raises ValueError, which names the file, where it has another form.
    """
    try:
        content = json.loads(path.read_text())
        return dict(content["header"]), [_from_json(row) for row in content["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no file of a benchmark suite ({error!r}); run the suite again") from error


def write_whole(path: Path, text: str) -> None:
    """Writes `text` where a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(path.suffix + ".tmp")
    draft.write_text(text)
    draft.replace(path)


def _as_json(row: Row) -> dict[str, Any]:
    figures = {
        name: [_rounded(value) for value in (figure.median, figure.low, figure.high)]
        if isinstance(figure, Spread)
        else _rounded(figure)
        for name, figure in row.figures.items()
    }
    return {"case": row.case, "peer": row.peer, **row.parameters, "figures": figures}


def _from_json(row: dict[str, Any]) -> Row:
    figures = {
        name: Spread(*figure) if isinstance(figure, list) else float(figure) for name, figure in row["figures"].items()
    }
    parameters = {key: value for key, value in row.items() if key not in ("case", "peer", "figures")}
    return Row(row["case"], row["peer"], figures, parameters)


def _rounded(value: float) -> float:
    exact = float(value)
    rounded = min(round(exact, _DECIMALS), float(f"{exact:.{_DIGITS}g}"), key=lambda each: abs(each - exact))
    return int(rounded) if rounded.is_integer() else rounded
