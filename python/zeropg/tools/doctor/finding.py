"""What a check returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warn", "no"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    state: ok: as it should be; warn: works, but worse than it could, or than a user may expect; no: not available.
    detail: what was found, and for warn and no the reason.
    remedy: what to do about it; "" where there is nothing to do.
    """

    topic: str
    state: State
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n{'':24} -> {self.remedy}" if self.remedy else ""
        return f"{self.state:4} {self.topic:18} {self.detail}{remedy}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)
