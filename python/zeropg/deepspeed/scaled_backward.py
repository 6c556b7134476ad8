"""Which backwards know already how their loss is scaled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import Variable

_by_engine: set[int] = set()  # ids of running graph tasks whose loss an engine has divided and scaled
_by_scale: set[int] = set()  # ids of those whose loss went through engine.scale


@contextmanager
def divided_by_engine(loss: torch.Tensor) -> Iterator[None]:
    """Inside, a backward from `loss` is one that an engine runs."""
    handle = _mark(loss, _by_engine)
    try:
        yield
    finally:
        handle.remove()


def mark_scaled(loss: torch.Tensor) -> torch.Tensor:
    """Marks a loss that was multiplied by the loss scale, for the backward that the program runs from it."""
    _mark(loss, _by_scale)
    return loss


def is_divided_by_engine() -> bool:
    """Whether the backward that runs now, on this thread, is an engine's own. For hooks of tensors."""
    return torch._C._current_graph_task_id() in _by_engine


def is_scaled() -> bool:
    """Whether the backward that runs now began at a loss from engine.scale. For hooks of tensors."""
    return torch._C._current_graph_task_id() in _by_scale


def _mark(loss: torch.Tensor, tasks: set[int]) -> torch.utils.hooks.RemovableHandle:
    def begin(_: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in tasks:
            tasks.add(task)
            Variable._execution_engine.queue_callback(lambda: tasks.discard(task))

    handle: torch.utils.hooks.RemovableHandle = loss.register_hook(begin)
    return handle
