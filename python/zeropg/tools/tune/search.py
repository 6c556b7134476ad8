"""Which candidates are run, in which order, and why: a pure procedure over a function that runs one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zeropg.tools.tune.candidates import Candidate

_WORSE = 0.85  # of the best speed so far: where a larger micro-batch is slower than that, larger ones are not tried
_NEAR = 0.93  # of the best speed: what is at least that fast is run again before the choice


@dataclass(frozen=True)
class Outcome:
    """Of one run. samples_per_second: None: it failed, as `problem` says. peak_bytes: of a node, or of one GPU."""

    samples_per_second: float | None
    peak_bytes: int = 0
    problem: str = ""


@dataclass
class Row:
    """A candidate and what was found out. why: the reason why it was run, or why not."""

    candidate: Candidate
    why: str
    planned_bytes: int
    speeds: list[float] = field(default_factory=list)  # samples per second, one for each run
    peak_bytes: int = 0
    problem: str = ""

    @property
    def speed(self) -> float:
        """The median; 0 where nothing was measured."""
        return statistics.median(self.speeds) if self.speeds else 0.0


@dataclass(frozen=True)
class Space:
    """What may be chosen from. stages, micro_batches: ascending. planned_bytes: as Row's. memory_bytes: there are."""

    stages: Sequence[int]
    micro_batches: Sequence[int]
    offload: str  # a directory for the optimizer's state, "" for none
    planned_bytes: Callable[[Candidate], int]
    refusal: Callable[[Candidate], str]  # why its configuration cannot be used; "" where it can
    memory_bytes: int


class Search:
    """Climbs to larger micro-batches in one stage, compares the stages there, and runs the nearest ones again."""

    def __init__(self, space: Space, run: Callable[[Candidate], Outcome], rounds: int) -> None:
        """rounds: how often the near ones are run in the end."""
        self._space = space
        self._run = run
        self._rounds = rounds
        self.rows: dict[Candidate, Row] = {}

    def best(self) -> Row | None:
        """Runs what it must; returns the fastest, or None where nothing ran."""
        stages, offload = self._usable_stages()
        if not stages:
            return None
        for stage in reversed(stages):
            self._climb(stage, offload)
            if self._top() is not None:
                break
        top = self._top()
        if top is None:
            return None
        climbed, size = top.candidate.stage, top.candidate.micro_batch
        for stage in stages:
            self._try(Candidate(stage, size, offload), f"another stage than {climbed}")
        self._look_beside()
        self._decide()
        return self._top()

    def _usable_stages(self) -> tuple[list[int], str]:
        """Stages whose model states fit, with the smallest micro-batch; on a disk only where none does in memory."""
        for offload in dict.fromkeys(["", self._space.offload]):
            usable = []
            for stage in self._space.stages:
                candidate = Candidate(stage, self._space.micro_batches[0], offload)
                problem = self._space.refusal(candidate) or self._too_large(candidate)
                if problem:
                    self._note(candidate, "not run", problem)
                else:
                    usable.append(stage)
            if usable:
                return usable, offload
        return [], ""

    def _climb(self, stage: int, offload: str) -> None:
        """From the smallest micro-batch on, until they no longer fit or are clearly slower."""
        why = "the smallest micro-batch"
        for number, size in enumerate(self._space.micro_batches):
            row = self._try(Candidate(stage, size, offload), why)
            top = self._top()
            if row.problem or (top is not None and row.speed < _WORSE * top.speed):
                for larger in self._space.micro_batches[number + 1 :]:
                    smaller = "failed" if row.problem else f"was slower than micro-batch {top.candidate.micro_batch}"  # type: ignore[union-attr]
                    self._note(Candidate(stage, larger, offload), "not run", f"micro-batch {size} {smaller}")
                return
            why = "a larger micro-batch"

    def _look_beside(self) -> None:
        """The micro-batches beside the best one, if that is in another stage than the climb's."""
        top = self._top()
        assert top is not None  # the climb has one
        sizes = list(self._space.micro_batches)
        place = sizes.index(top.candidate.micro_batch)
        for size in (*sizes[max(0, place - 1) : place], *sizes[place + 1 : place + 2]):
            self._try(Candidate(top.candidate.stage, size, top.candidate.offload), "beside the best micro-batch")

    def _decide(self) -> None:
        """Runs the near ones again in turns: what was slow by chance gets another chance, and so does luck."""
        top = self._top()
        assert top is not None
        near = [row for row in self.rows.values() if row.speed >= _NEAR * top.speed]
        for _ in range(self._rounds if len(near) > 1 else 0):
            for row in near:
                self._measure(row)

    def _try(self, candidate: Candidate, why: str) -> Row:
        known = self.rows.get(candidate)
        if known is not None and (known.speeds or known.problem):
            return known
        problem = self._space.refusal(candidate) or self._too_large(candidate)
        row = self._note(candidate, "not run" if problem else why, problem)
        if not problem:
            self._measure(row)
        return row

    def _measure(self, row: Row) -> None:
        outcome = self._run(row.candidate)
        row.peak_bytes = max(row.peak_bytes, outcome.peak_bytes)
        if outcome.samples_per_second is None:
            row.problem = row.problem or outcome.problem
        else:
            row.speeds.append(outcome.samples_per_second)

    def _note(self, candidate: Candidate, why: str, problem: str) -> Row:
        row = Row(candidate, why, self._space.planned_bytes(candidate), problem=problem)
        self.rows[candidate] = row
        return row

    def _top(self) -> Row | None:
        """The fastest that has not failed in any run."""
        good = [row for row in self.rows.values() if row.speeds and not row.problem]
        return max(good, key=lambda row: row.speed, default=None)

    def _too_large(self, candidate: Candidate) -> str:
        """Why it does not fit: by the plan, or by what smaller micro-batches have needed; "" where it fits."""
        planned, limit = self._space.planned_bytes(candidate), self._space.memory_bytes
        if planned > limit:
            return "its model states do not fit"
        expected = self._expected_bytes(candidate, planned)
        return "expected not to fit, by what smaller micro-batches needed" if expected > limit else ""

    def _expected_bytes(self, candidate: Candidate, planned: int) -> float:
        """A line through what two micro-batches needed beside their plans; without two of them the plan."""
        measured = {
            row.candidate.micro_batch: row.peak_bytes - row.planned_bytes for row in self.rows.values() if row.speeds
        }
        if len(measured) < 2:
            return planned
        (small, beside_small), *_, (large, beside_large) = sorted(measured.items())
        slope = max(0.0, (beside_large - beside_small) / (large - small))
        return planned + beside_large + slope * (candidate.micro_batch - large)
