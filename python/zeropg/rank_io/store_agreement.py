"""The agreement of `agreement.together` through the group's store: for a thread that must not start a collective.

Collectives are matched by their order, which belongs to the thread that trains. A store has names instead: each step of
each agreement has keys of its own. A rank that takes long shows that it lives by raising a counter.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeropg.rank_io.agreement import collective_device, failure_report, raise_failures

_BEAT_SECONDS = 1.0
# What a rank may go without a sign of life, and the store without an answer, unless the group's timeout is shorter.
_PATIENCE_SECONDS = 60.0
_LEAST_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01
_MAX_POLL_SECONDS = 0.2
_GOOD_BYE_SECONDS = 5.0


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Returns a connection of its own to the store that `group` was made with; None where torch knows none."""
    known = dist.distributed_c10d._world.pg_map.get(group)
    return known[1].clone() if known is not None and hasattr(known[1], "clone") else None


def patience_of(group: dist.ProcessGroup) -> float:
    """Returns the seconds after which a rank of `group` is given up."""
    backend = group._get_backend(collective_device(group))
    timeout = getattr(backend, "_timeout", None) or getattr(getattr(backend, "options", None), "_timeout", None)
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else _PATIENCE_SECONDS
    return min(_PATIENCE_SECONDS, max(_LEAST_PATIENCE_SECONDS, limit))


class StoreAgreement:
    """Steps that all ranks take; a failure anywhere is the same error everywhere. One thread at a time.

    From `start` to `finish` a thread of its own shows the others once a second that this process lives.

    Args:
        store: a connection that nobody else uses.
        name: the same on all ranks, never used before in this store.
        operation: the public function's name, for messages.
        patience: the seconds after which a rank, or the store, is given up.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int, operation: str, patience: float) -> None:
        self._store = PrefixStore(f"zeropg/{name}", store)
        self._rank = rank
        self._world_size = world_size
        self._operation = operation
        self._patience = patience
        self._heard = 0.0  # when the store answered last
        self._is_silent = False
        self._step = 0
        self._is_over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="zeropg-signs-of-life", daemon=True)

    def start(self) -> None:
        self._beats.start()

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """As `_agreement.together`, for this thread."""
        try:
            report: dict[str, Any] = {"value": action()}
            cause: Exception | None = None
        except Exception as error:
            report, cause = failure_report(error), error
        step = self._step
        self._step += 1
        try:
            reports = self._ask(lambda: self._exchange(step, report))
        except (RuntimeError, TimeoutError) as error:  # of the store: its server is gone, or rank 0 is
            raise self._lost(str(error), cause) from (cause or error)
        if lost := [entry["lost"] for entry in reports if "lost" in entry]:
            raise self._lost(lost[0], cause) from cause
        failed = {rank: entry for rank, entry in enumerate(reports) if "error" in entry}
        if failed:
            raise_failures(self._rank, self._world_size, self._operation, failed, cause)
        return [entry["value"] for entry in reports]

    def finish(self) -> None:
        """Removes the keys; rank 0 waits a little for the others, so that the last step's answer reaches them."""
        self._is_over.set()
        if self._is_silent:
            return
        if self._beats.ident is not None:  # started: inside the store it must not meet the interpreter's end
            self._beats.join(_GOOD_BYE_SECONDS)
        with suppress(RuntimeError, TimeoutError):
            self._ask(self._say_good_bye)

    def _say_good_bye(self) -> None:
        if self._rank != 0:
            self._store.add("done", 1)
            return
        deadline = time.monotonic() + min(self._patience, _GOOD_BYE_SECONDS)
        while self._store.add("done", 0) < self._world_size - 1 and time.monotonic() < deadline:
            self._heard = time.monotonic()
            time.sleep(_POLL_SECONDS)
        if self._store.add("done", 0) < self._world_size - 1:
            return  # somebody has yet to read the last answer; a few small keys stay
        for step in range(self._step):
            for key in ("all", *range(self._world_size)):
                self._store.delete_key(f"{step}/{key}")
        for rank in range(self._world_size):
            self._store.delete_key(f"alive/{rank}")
        self._store.delete_key("done")

    def _ask(self, exchange: Callable[[], Any]) -> Any:
        """Returns what `exchange` with the store gives. Raises TimeoutError where the store falls silent.

        A call to a store whose host has vanished does not come back, so it has a thread that nobody waits for.
        """
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(exchange())
            except BaseException as error:
                answer.set_exception(error)

        self._heard = time.monotonic()
        threading.Thread(target=run, name="zeropg-store", daemon=True).start()
        while not wait([answer], _MAX_POLL_SECONDS).done:
            if time.monotonic() - self._heard > self._patience:
                self._is_silent = True
                raise TimeoutError(f"the store has not answered for {self._patience:.0f} s, so its host is gone")
        return answer.result()

    def _exchange(self, step: int, report: dict[str, Any]) -> list[dict[str, Any]]:
        self._store.set(f"{step}/{self._rank}", json.dumps(report))
        # Rank 0 collects, so that each rank reads one value rather than all ranks' values.
        if self._rank != 0:
            reports: list[dict[str, Any]] = json.loads(self._get(f"{step}/all", 0))
            return reports
        reports = []
        for rank in range(self._world_size):
            reports.append(self._collect(step, rank))
            if "lost" in reports[-1]:  # the others of its host are lost too: they would take as long again
                break
        self._store.set(f"{step}/all", json.dumps(reports))
        return reports

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_SECONDS):
            with suppress(RuntimeError):
                self._store.add(f"alive/{self._rank}", 1)

    def _collect(self, step: int, rank: int) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads(self._get(f"{step}/{rank}", rank))
        except TimeoutError as error:
            return {"lost": str(error)}
        return report

    def _get(self, key: str, rank: int) -> bytes:
        """Waits for `key`, which `rank` sets, as long as that rank gives signs of life."""
        beats, seen = 0, time.monotonic()
        pause = _POLL_SECONDS
        while not self._store.check([key]):
            self._heard = time.monotonic()
            if (count := self._store.add(f"alive/{rank}", 0)) != beats:
                beats, seen = count, time.monotonic()
            if time.monotonic() - seen > self._patience:
                raise TimeoutError(f"rank {rank} has given no sign of life for {self._patience:.0f} s, so it died")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        return bytes(self._store.get(key))

    def _lost(self, what: str, own_failure: Exception | None) -> dist.DistBackendError:
        own = f"; this rank itself had failed: {own_failure}" if own_failure else ""
        return dist.DistBackendError(
            f"[zeropg rank {self._rank}/{self._world_size}] {self._operation}: the ranks cannot reach each other any "
            f"more: {what}{own}; look at the other ranks' logs, then start again"
        )
