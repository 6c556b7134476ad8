"""What the ranks of a case and the command that started them tell each other, through a folder that both see."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropg.tools.bench.harness import read_json, write_json
from zeropg.tools.bench.nodes.cases import Point
from zeropg.tools.lab.lab import Lab

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Plan:
    """What ranks do. `drops`: host, its rate meanwhile, and the usual one. `operations`: at each rate."""

    points: tuple[Point, ...]
    program: str
    rounds: int
    turn_seconds: float
    operations: int
    counts_cpu: bool
    drops: tuple[int, str, str | None] | None


@dataclass(frozen=True)
class Dialogue:
    """The command gives a plan; rank 0 tells what came out, and wishes for other rates, which the command fulfils."""

    folder: Path

    # --- the ranks ---

    def plan(self) -> Plan:
        content = read_json(self._plan)
        points = tuple(Point(**point) for point in content.pop("points"))
        drops = content.pop("drops")
        return Plan(points=points, drops=drops and tuple(drops), **content)

    def tell(self, measured: dict[str, Any]) -> None:
        """What came out at the next point of the plan."""
        with self._results.open("a") as file:
            file.write(json.dumps(measured) + "\n")

    def change_rate(self, host: int, rate: str | None, timeout: float) -> None:
        """Returns when the host's link has that rate. Raises RuntimeError where nobody changes it."""
        write_json(self._wish, {"host": host, "rate": rate})
        deadline = time.monotonic() + timeout
        while self._wish.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the command did not give host {host} the rate {rate} within {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    # --- the command ---

    def give(self, plan: Plan) -> None:
        write_json(self._plan, asdict(plan))

    def results(self) -> list[dict[str, Any]]:
        """What came out so far, a point each."""
        text = self._results.read_text() if self._results.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def told(self) -> int:
        """How many points came out so far. Cheap, since it is asked while ranks are timed."""
        return self._results.read_bytes().count(b"\n") if self._results.exists() else 0

    def fulfil(self, lab: Lab) -> None:
        """Changes a rate where the ranks wish that."""
        if self._wish.exists():
            wish = read_json(self._wish)
            lab.set_rate(wish["host"], wish["rate"])
            self._wish.unlink()

    @property
    def _plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def _results(self) -> Path:
        return self.folder / "results.jsonl"

    @property
    def _wish(self) -> Path:
        return self.folder / "wish.json"
