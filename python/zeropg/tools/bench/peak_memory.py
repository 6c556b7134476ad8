"""`PeakMemory`: the most that a process holds for a while."""

from __future__ import annotations

import threading
from types import TracebackType

from zeropg.tools.train.memory import resident_bytes

_SAMPLES_APART_S = 0.005


class PeakMemory:
    """Looks at the process's memory every few milliseconds, inside the context."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLES_APART_S):
            self.bytes = max(self.bytes, resident_bytes())
