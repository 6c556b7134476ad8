"""What each training run gave, one line of JSON as soon as it has: a study that was cut goes on from there."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from zeropg.tools.bench.loss.outcome import Job, Outcome

_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs take place. `commit`: of the source, or the version; outcomes of another one do not count."""

    link: str | None
    hosts: int
    ranks_per_host: int
    commit: str


@dataclasses.dataclass(frozen=True)
class Journal:
    """The file. One process appends; what is not a whole line (it was cut there) is no outcome."""

    path: Path

    def append(self, place: Place, job: Job, outcome: Outcome) -> None:
        line = json.dumps({"key": _key(place, job), "outcome": dataclasses.asdict(outcome)})
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def outcomes(self, place: Place, jobs: Sequence[Job]) -> dict[Job, Outcome]:
        """Of those of `jobs` that have run at `place`."""
        kept = dict(self._lines())
        return {job: kept[_key(place, job)] for job in jobs if _key(place, job) in kept}

    def _lines(self) -> Iterator[tuple[str, Outcome]]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                content = json.loads(line)
                fields = content["outcome"]
                curve = [(step, loss) for step, loss in fields["curve"]]
                yield content["key"], Outcome(**{**fields, "curve": curve})
            except (json.JSONDecodeError, KeyError, TypeError):
                continue

    @contextmanager
    def progress(self, place: Place, jobs: Sequence[Job]) -> Iterator[None]:
        """A bar on a terminal that counts the runs of `jobs` while another process appends."""
        done = threading.Event()
        bar = tqdm(total=len(jobs), unit="run", file=sys.stderr, leave=False, disable=not sys.stderr.isatty())

        def follow() -> None:
            while not done.wait(_POLL_SECONDS):
                bar.update(len(self.outcomes(place, jobs)) - bar.n)

        follower = threading.Thread(target=follow, daemon=True)
        if not bar.disable:
            follower.start()
        try:
            yield
        finally:
            done.set()
            if follower.is_alive():
                follower.join()
            bar.close()


def _key(place: Place, job: Job) -> str:
    return json.dumps([dataclasses.asdict(place), dataclasses.asdict(job)], sort_keys=True)
