"""A signal that interrupts what a rank waits in."""

from __future__ import annotations

import signal
import time
from typing import Any


class Rung(Exception):
    """The text is the time.monotonic() at which the handler ran."""


def ring_in(seconds: float) -> None:
    """Has a signal's handler raise Rung in the main thread."""

    def handle(number: int, frame: Any) -> None:
        raise Rung(str(time.monotonic()))

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
