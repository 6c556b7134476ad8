"""What ranks measured as rows: beside gloo, and beside what the links allow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zeropg.tools.bench.nodes.cases import PEERS, Case, Point
from zeropg.tools.bench.results import Row, Spread, ratios

NEAR = 1.3  # times the bound: a link's new rate is noticed
SETTLED = 20  # operations after a change by which it should be
_BASELINE = "gloo"
_LEAST_BYTES = 4096  # what is smaller takes a latency: a bandwidth says nothing about it, and neither do seconds per GB


@dataclass(frozen=True)
class Measured:
    """One point of a case. `bounds`: seconds by the links as they are, and by those with the lower rate, if any."""

    name: str
    case: Case
    point: Point
    bounds: tuple[float, ...]
    result: dict[str, Any]

    def row(self, peer: str, figures: dict[str, Spread | float], **more: int) -> Row:
        point: dict[str, str | int] = {"operation": self.point.operation, "bytes": self.point.bytes}
        return Row(self.name, peer, figures, {"what": self.case.what, **point, **more})


def rows_of(measured: Measured, *, may_claim: bool) -> list[Row]:
    """A row per peer; where a link changed also one per operation. Without `may_claim` there are no ratios to gloo."""
    rows = {"turns": _turns, "drop": _drop, "stopped": _stopped}[measured.case.program]
    return [row for peer in PEERS for row in rows(measured, peer, may_claim)]


def _turns(measured: Measured, peer: str, may_claim: bool) -> Iterator[Row]:
    medians = {name: [statistics.median(each) for each in of] for name, of in measured.result["seconds"].items()}
    figures: dict[str, Spread | float] = {"time_ms": _scaled(1e3, medians[peer])}
    is_small = measured.point.bytes < _LEAST_BYTES
    if measured.bounds and not is_small:
        (bound,) = measured.bounds
        figures |= {"bound_ms": 1e3 * bound, "percent_of_bound": Spread.of([100 * bound / s for s in medians[peer]])}
    cpu = None if is_small else measured.result.get("cpu_seconds")
    if cpu is not None:
        figures["cpu_s_per_gb"] = _scaled(1e9 / measured.point.bytes, cpu[peer])
    if may_claim:
        figures |= _beside_gloo(medians, peer)
        if cpu is not None and peer != _BASELINE:
            figures["cpu_over_gloo"] = ratios(cpu[peer], cpu[_BASELINE])
    yield measured.row(peer, figures)


def _drop(measured: Measured, peer: str, may_claim: bool) -> Iterator[Row]:
    usual, lower = measured.bounds
    rounds: list[list[float]] = measured.result["seconds"][peer]
    third = len(rounds[0]) // 3
    settled = min(SETTLED, third - 1)
    figures: dict[str, Spread | float] = {
        "time_ms": _scaled(1e3, [statistics.median(times[:third]) for times in rounds]),
        "bound_ms": 1e3 * usual,
        "dropped_bound_ms": 1e3 * lower,
    }
    for place, (name, bound) in enumerate((("dropped", lower), ("restored", usual)), start=1):
        of_third = [times[place * third : (place + 1) * third] for times in rounds]
        late = [statistics.median(times[settled:]) for times in of_third]
        figures |= {f"{name}_ms": _scaled(1e3, late), f"{name}_over_bound": _scaled(1 / bound, late)}
        near = _first_near([statistics.median(each) for each in zip(*of_third, strict=True)], bound)
        figures |= {} if near is None else {f"{name}_near_after_operations": float(near)}
    yield measured.row(peer, figures)
    for number, each in enumerate(zip(*rounds, strict=True)):
        yield measured.row(peer, {"time_ms": _scaled(1e3, each)}, number=number)


def _first_near(times: Sequence[float], bound: float) -> int | None:
    """How many operations took longer than NEAR bounds before the first that did not; None: all did."""
    return next((number for number, each in enumerate(times) if each <= NEAR * bound), None)


def _stopped(measured: Measured, peer: str, may_claim: bool) -> Iterator[Row]:
    disturbed, undisturbed = measured.result["seconds"], measured.result["undisturbed"]
    shares = [100 * a / b for a, b in zip(undisturbed[peer], disturbed[peer], strict=True)]
    figures: dict[str, Spread | float] = {
        "time_ms": _scaled(1e3, disturbed[peer]),
        "undisturbed_ms": _scaled(1e3, undisturbed[peer]),
        "percent_of_undisturbed": Spread.of(shares),
    }
    yield measured.row(peer, figures | (_beside_gloo(disturbed, peer) if may_claim else {}))


def _beside_gloo(times: dict[str, list[float]], peer: str) -> dict[str, Spread | float]:
    return {} if peer == _BASELINE else {"faster_than_gloo": ratios(times[_BASELINE], times[peer])}


def _scaled(factor: float, values: Sequence[float]) -> Spread:
    return Spread.of([factor * each for each in values])
