"""Signals that ask for the end: an exception, so that the run of the moment and its folder go, too."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks for the end; the text is its name."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raises Stopped inside the `with` where such a signal comes, once; those after it are ignored until its end.

    A signal that is ignored before, as SIGHUP is under nohup, stays so.
    """

    def stop(number: int, frame: object) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(number)

    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in heeded}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
