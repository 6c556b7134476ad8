"""What the codecs of each living model have done on this rank, for `report` and `zeropg.stats`."""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from zeropg._native import _C


@dataclass(eq=False, kw_only=True)
class Coding:
    """Of one model: its meter, which every encoded call of it gets, and what its encodings still owe.

    backend: of the group whose ranks have the model.
    describe: what it is encoded by now.
    exposed_seconds: in which the model has waited for its communication; None where somebody else waits.
    """

    backend: Any
    describe: Callable[[], str]
    residuals: _C.ResidualStore | None = None
    exposed_seconds: Callable[[], float] | None = None
    meter: _C.CodecMeter = field(default_factory=_C.CodecMeter)

    def __post_init__(self) -> None:
        _living.add(self)

    def residual_norms(self) -> dict[str, float]:
        """Of what is still owed to each parameter, the largest first."""
        squares: dict[str, float] = {}
        for name, _, _, values in [] if self.residuals is None else self.residuals.segments():
            squares[name] = squares.get(name, 0.0) + float(values.double().square().sum())
        return {name: math.sqrt(each) for name, each in sorted(squares.items(), key=lambda item: -item[1])}


_living: weakref.WeakSet[Coding] = weakref.WeakSet()


def coding_statistics(backend: Any) -> dict[str, Any] | None:
    """What `zeropg.stats` says of compression on this group; None where nothing has travelled encoded."""
    codings = list(_codings_of(backend))
    sums: dict[str, Any] = dict(_C.coding(backend))  # of calls without a State
    for coding in codings:
        for name, counted in coding.meter.counters().items():
            sums[name] += counted
    if sums["calls"] == 0:
        return None
    norms: dict[str, float] = {}
    for coding in codings:
        for name, norm in coding.residual_norms().items():
            norms[name] = math.hypot(norm, norms.get(name, 0.0))
    exposed = [coding.exposed_seconds() for coding in codings if coding.exposed_seconds is not None]
    return {**sums, "exposed_seconds": math.fsum(exposed) if exposed else None, "residual_norms": norms}


def _codings_of(backend: Any) -> Iterator[Coding]:
    return (coding for coding in list(_living) if coding.backend is backend)
