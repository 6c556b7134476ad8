"""The agreement through a store, on one rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from zeropg.rank_io import store_agreement
from zeropg.rank_io.store_agreement import StoreAgreement


def test_no_thread_is_left_inside_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the interpreter's end a thread that comes back from the store's C++ would abort the process."""
    monkeypatch.setattr(store_agreement, "_BEAT_SECONDS", 0.0)
    inside = threading.Event()

    class SlowStore:
        def __init__(self, store: dist.Store) -> None:
            self._store = store

        def add(self, key: str, amount: int) -> int:
            if key.startswith("alive"):
                inside.set()
                time.sleep(0.2)
            return self._store.add(key, amount)

        def delete_key(self, key: str) -> bool:
            return self._store.delete_key(key)

    agreement = StoreAgreement(dist.HashStore(), "test", 0, 1, "save_checkpoint", patience=60)
    monkeypatch.setattr(agreement, "_store", SlowStore(agreement._store))
    agreement.start()
    assert inside.wait(10)
    agreement.finish()
    assert "zeropg-signs-of-life" not in [thread.name for thread in threading.enumerate()]


def test_an_agreement_that_never_started_can_finish() -> None:
    StoreAgreement(dist.HashStore(), "test", 0, 1, "save_checkpoint", patience=60).finish()
