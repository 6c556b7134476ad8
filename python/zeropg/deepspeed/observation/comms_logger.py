"""`comms_logger`: what collectives have moved and how fast, in DeepSpeed's table."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup, get_rank

from zeropg.backend import stats
from zeropg.deepspeed.observation.observer import Facts, Observer, say

Counters = Mapping[str, Mapping[str, Any]]  # what zeropg.stats() returns

# As nccl-tests count: of a message's bytes, what passes the link of a rank at least, of so many ranks.
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}
_NO_OPERATION = "compression"  # of stats(): what codecs do inside of operations
_COUNTED_BY_BLOCKS = ("all_gather", "reduce_scatter")  # by stats(): one rank's block, where a message has those of all


@dataclass(frozen=True)
class Row:
    """An operation's calls in some time. bytes: of its messages."""

    operation: str
    calls: int
    bytes: int
    seconds: float
    straggler_seconds: float  # of these, waiting for the rank that was waited for longest
    bus_factor: float

    @property
    def gbps(self) -> float:
        """1e9 bits of messages per second."""
        return 8e-9 * self.bytes / self.seconds if self.seconds else 0.0

    @property
    def bus_gbps(self) -> float:
        """1e9 bits per second that a rank's link carried at least."""
        return self.gbps * self.bus_factor


class CommsLogger(Observer):
    """Counts the operations of one group from its construction on.

    The counters are the process group's own, so logging costs nothing but for a look at them. verbose: a line on rank 0
    for each kind of operation of each update.
    """

    def __init__(self, group: ProcessGroup, *, verbose: bool, only: Collection[str] | None) -> None:
        """only: the operations to log; None: all. Raises ValueError where the group is none of zeropg's."""
        try:
            self._first = self._last = stats(group)
        except TypeError:
            raise ValueError(
                "[zeropg] initialize: comms_logger.enabled is true, but the process group is none of zeropg's, which "
                'keep the counters; use init_process_group("zeropg"), or torch.profiler'
            ) from None
        self._group = group
        self._verbose = verbose and group.rank() == 0
        self._only = only
        _LOGGERS.add(self)

    def updated(self, facts: Facts) -> None:
        if not self._verbose:
            return
        now = stats(self._group)
        for row in self._rows(self._last, now):
            say(
                f"step={facts.step} comm op: {row.operation} | count: {row.calls} | time (ms): {1e3 * row.seconds:.2f} "
                f"| bytes: {row.bytes} | algbw (Gbps): {row.gbps:.2f} | busbw (Gbps): {row.bus_gbps:.2f}"
            )
        self._last = now

    def rows(self) -> list[Row]:
        """One for each operation that was called."""
        return self._rows(self._first, stats(self._group))

    def summary(self, show_straggler: bool = False) -> str:
        """A table of `rows`."""
        head = ["Comm. Op", "Count", "Bytes", "Total Latency(ms)", "Avg Latency(ms)", "algbw(Gbps)", "busbw(Gbps)"]
        lines = [head + (["Straggler(ms)"] if show_straggler else [])]
        for row in self.rows():
            milliseconds = 1e3 * row.seconds
            cells = [row.operation, str(row.calls), str(row.bytes), f"{milliseconds:.2f}"]
            cells += [f"{milliseconds / row.calls:.3f}", f"{row.gbps:.2f}", f"{row.bus_gbps:.2f}"]
            lines.append(cells + ([f"{1e3 * row.straggler_seconds:.2f}"] if show_straggler else []))
        return "\n".join(f"{line[0]:<36}" + "".join(f"{cell:>19}" for cell in line[1:]) for line in lines)

    def _rows(self, before: Counters, now: Counters) -> list[Row]:
        rows = []
        for name, counted in now.items():
            if name == _NO_OPERATION:
                continue
            old = before.get(name, {})
            calls = counted["calls"] - old.get("calls", 0)
            if calls == 0 or (self._only is not None and name not in self._only):
                continue
            waited = counted["waiting_seconds"]
            earlier = old.get("waiting_seconds", [0.0] * len(waited))
            longest = max((late - then for late, then in zip(waited, earlier, strict=True)), default=0.0)
            seconds = counted["seconds"] - old.get("seconds", 0.0)
            moved = counted["bytes"] - old.get("bytes", 0)
            moved *= self._group.size() if name.startswith(_COUNTED_BY_BLOCKS) else 1
            rows.append(Row(name, calls, moved, seconds, longest, _bus_factor(name, self._group.size())))
        return rows


def _bus_factor(operation: str, ranks: int) -> float:
    return next((of(ranks) for name, of in _BUS_FACTORS.items() if operation.startswith(name)), 1.0)


_LOGGERS: weakref.WeakSet[CommsLogger] = weakref.WeakSet()


def log_summary(show_straggler: bool = False) -> None:
    """Prints, on rank 0, the table of each engine whose configuration enables `comms_logger`. Does not communicate.

    show_straggler: add the time for which this rank waited for the rank that it waited for longest.
    """
    for logger in list(_LOGGERS):
        if get_rank() == 0:
            print(logger.summary(show_straggler), flush=True)
