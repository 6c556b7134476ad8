"""A signal that interrupts what a rank waits in."""

from __future__ import annotations

import signal
import time
from typing import Any


class Rung(Exception):
    """The text is the time.monotonic() at which the handler ran."""


def prepare_to_ring() -> None:
    """SIGALRM makes the main thread raise Rung."""

    def handle(number: int, frame: Any) -> None:
        raise Rung(str(time.monotonic()))

    signal.signal(signal.SIGALRM, handle)


def ring_in(seconds: float) -> None:
    """Raises Rung in the main thread."""
    prepare_to_ring()
    signal.setitimer(signal.ITIMER_REAL, seconds)
