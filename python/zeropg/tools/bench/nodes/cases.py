"""The cases of `bench nodes`: which hosts and links there are, where the ranks stand, and what they do."""

from __future__ import annotations

from dataclasses import dataclass

from zeropg.tools.bench.nodes.steps import STEPS, WEIGHT_BYTES

PEERS = ("zeropg", "gloo")
_LARGE, _HUGE = 16 << 20, 64 << 20
_SMALL = (8, 64 << 10)
_SLOW = "200mbit"


@dataclass(frozen=True)
class Point:
    """One operation of fp32 on so many bytes, as nccl-tests counts them; or a training step of a model of so many."""

    operation: str
    bytes: int


@dataclass(frozen=True)
class Case:
    """`hosts`: of each rank. `rates`: of each host's link, as `tc` writes it; None: no limit.

    program: what the ranks do; rank.py has them. `counts_cpu`: also CPU seconds, which matter where links do not limit.
    drops: host and rate of the link that changes in the middle.
    """

    what: str
    hosts: tuple[int, ...]
    rates: tuple[str | None, ...]
    points: tuple[Point, ...]
    racks: int = 1
    uplink: str | None = None
    program: str = "turns"
    counts_cpu: bool = False
    drops: tuple[int, str] | None = None

    @property
    def ranks(self) -> list[int]:
        """The number of ranks on each host."""
        return [self.hosts.count(host) for host in range(len(self.rates))]


def _each(*sizes: int, operations: tuple[str, ...] = ("all_reduce",)) -> tuple[Point, ...]:
    return tuple(Point(operation, size) for operation in operations for size in sizes)


_THREE = _each(_LARGE, operations=("all_reduce", "reduce_scatter", "all_gather"))
_ONE_EACH, _TWO_EACH = (0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3)

CASES = {
    "2x2": Case("2 nodes x 2 ranks, 200 Mbit/s", (0, 0, 1, 1), (_SLOW,) * 2, _each(*_SMALL) + _THREE),
    "3+1": Case("2 nodes with 3 ranks and 1, 200 Mbit/s", (0, 0, 0, 1), (_SLOW,) * 2, _THREE),
    "across": Case("2 nodes x 2 ranks numbered across them, 200 Mbit/s", (0, 1, 0, 1), (_SLOW,) * 2, _THREE),
    "4x1": Case("4 nodes x 1 rank, 200 Mbit/s", _ONE_EACH, (_SLOW,) * 4, _each(*_SMALL) + _THREE),
    "4x2": Case("4 nodes x 2 ranks, 200 Mbit/s", _TWO_EACH, (_SLOW,) * 4, _THREE),
    "slow_link": Case(
        "4 nodes x 1 rank, 200 Mbit/s, one link 100", _ONE_EACH, (*(_SLOW,) * 3, "100mbit"), _each(_LARGE)
    ),
    "racks": Case(
        "2 racks x 2 nodes, 200 Mbit/s, uplinks 50",
        _ONE_EACH,
        (_SLOW,) * 4,
        _THREE,
        racks=2,
        uplink="50mbit",
    ),
    "fast_2x1": Case(
        "2 nodes x 1 rank, no limit", (0, 1), (None,) * 2, _each(*_SMALL, 1 << 20, _HUGE), counts_cpu=True
    ),
    "fast_2x2": Case(
        "2 nodes x 2 ranks, no limit", (0, 0, 1, 1), (None,) * 2, _each(*_SMALL, 1 << 20, _HUGE), counts_cpu=True
    ),
    "fast_4x1": Case("4 nodes x 1 rank, no limit", _ONE_EACH, (None,) * 4, _each(*_SMALL)),
    "drop": Case(
        "4 nodes x 1 rank, 200 Mbit/s, one link drops to 50 and comes back",
        _ONE_EACH,
        (_SLOW,) * 4,
        _each(4 << 20),
        program="drop",
        drops=(3, "50mbit"),
    ),
    "stopped": Case(
        "4 nodes x 2 ranks, 200 Mbit/s, one rank stands still for 50 ms of every second",
        _TWO_EACH,
        (_SLOW,) * 4,
        _each(1 << 20),
        program="stopped",
    ),
    "train": Case(
        "2 nodes x 2 ranks, 200 Mbit/s, a GPT's training step",
        (0, 0, 1, 1),
        (_SLOW,) * 2,
        _each(WEIGHT_BYTES, operations=tuple(STEPS)),
    ),
}
