"""Which backwards know already how their loss is scaled, and by what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd import Variable


class Scaling(NamedTuple):
    """What a loss was multiplied by, and divided by."""

    scale: float
    steps: int


_by_engine: dict[int, Scaling] = {}  # by the id of a running graph task whose loss an engine has divided and scaled
_running: dict[int, Scaling] = {}  # by thread: of an engine's backward; those inside one are part of it (checkpoints)
_by_scale: dict[int, Scaling] = {}  # of those whose loss went through engine.scale


@contextmanager
def divided_by_engine(loss: torch.Tensor, scaling: Scaling) -> Iterator[None]:
    """Inside, a backward from `loss` is one that an engine runs. Nothing else may know `loss`: hooks run in order."""
    handle = _mark(loss, _by_engine, scaling)
    thread = threading.get_ident()
    outer = _running.get(thread)
    _running[thread] = scaling
    try:
        yield
    finally:
        handle.remove()
        del _running[thread]
        if outer is not None:
            _running[thread] = outer


def mark_scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """Marks a loss that was multiplied by the loss scale, for the backward that the program runs from it."""
    _mark(loss, _by_scale, Scaling(scale, 1))
    return loss


def scaling_by_engine() -> Scaling | None:
    """Of the backward that runs now, on this thread, if it is an engine's own. For hooks of tensors."""
    return _by_engine.get(torch._C._current_graph_task_id()) or _running.get(threading.get_ident())


def scaling_by_hand() -> Scaling | None:
    """Of the backward that runs now, if it began at a loss from engine.scale. For hooks of tensors."""
    return _by_scale.get(torch._C._current_graph_task_id())


def _mark(loss: torch.Tensor, tasks: dict[int, Scaling], scaling: Scaling) -> torch.utils.hooks.RemovableHandle:
    def begin(_: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in tasks:
            tasks[task] = scaling
            Variable._execution_engine.queue_callback(lambda: end(task))

    def end(task: int) -> None:
        tasks.pop(task, None)

    handle: torch.utils.hooks.RemovableHandle = loss.register_hook(begin)
    return handle
