"""What sets a model's masters, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeropg._native import _C
from zeropg.rank_io.agreement import together
from zeropg.rank_io.progress import progress

Advance = Callable[[int], None]


def load_masters(
    core: _C.ShardedModule,
    operation: str,
    own_bytes: int,
    read: Callable[[Advance], None],
    finish: Callable[[Advance, Exception | None], Any],
) -> None:
    """Runs `read` between the core's begin_step and end_load, with a bar on rank 0; then `finish`. Collective.

    finish: gets what `read` raised; what it raises itself is raised on every rank.
    """
    with progress(operation, own_bytes, is_shown=core.rank == 0) as advance:
        core.begin_step()
        failure: Exception | None = None
        try:
            read(advance)
        except Exception as error:
            failure = error
        finally:
            core.end_load()  # also after an error: the other ranks are waiting in theirs
        together(core.process_group, operation, lambda: finish(advance, failure))
