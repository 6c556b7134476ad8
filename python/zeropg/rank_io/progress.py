"""A bar for what takes long: on a terminal, and only once it has taken a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_DELAY = 1.0  # seconds


@contextmanager
def progress(operation: str, total_bytes: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes just moved."""
    bar: Any = None
    if is_shown and sys.stderr is not None and sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            options = {"unit": "B", "unit_scale": True, "delay": _DELAY, "leave": False}
            bar = tqdm(total=total_bytes, desc=operation, **options)

    def advance(moved_bytes: int) -> None:
        if bar is not None:
            bar.update(moved_bytes)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()
