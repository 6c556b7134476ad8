"""What a folder of logs says of its run: the host of each rank, and how the run ended. In DIR/run.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "run.json"
_FORMAT = "zeropg.run.1"


@dataclass(frozen=True)
class RankFailure:
    """rank: None where no rank was the reason, but its host. how: "exit code 1", "killed by SIGKILL"."""

    rank: int | None
    host: str
    how: str


@dataclass(frozen=True)
class Record:
    """hosts: by rank. failures: the first one first; None: the run goes on, or was killed. stopped: by which signal."""

    hosts: list[str]
    failures: list[RankFailure] | None = None
    stopped: str = ""


def write_record(folder: Path, record: Record) -> None:
    """Whoever reads meanwhile finds the one before, or this one. Raises OSError."""
    new = folder / f"{NAME}.new"
    new.write_text(json.dumps({"format": _FORMAT, **asdict(record)}) + "\n", encoding="utf-8")
    new.replace(folder / NAME)


def read_record(folder: Path) -> Record | None:
    """None where there is no record. Raises ValueError where the file is something else."""
    path = folder / NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("format") != _FORMAT:
            raise ValueError(f"expected the format {_FORMAT}")
        failures = fields.pop("failures")
        return Record(failures=None if failures is None else [RankFailure(**one) for one in failures], **fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of a run ({type(error).__name__}: {error}); remove it") from None
