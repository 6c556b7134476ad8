"""Streams, events, ranges and graphs of a GPU. Without one there are none, and contexts do nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """Without a GPU, streams, events and graphs are None, as in DeepSpeed, and calls have done their work at once."""

    @property
    def Stream(self) -> type[torch.cuda.Stream] | None:
        return torch.cuda.Stream if torch.cuda.is_available() else None

    @property
    def Event(self) -> type[torch.cuda.Event] | None:
        return torch.cuda.Event if torch.cuda.is_available() else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work goes to the stream."""
        return torch.cuda.stream(stream) if torch.cuda.is_available() else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index) if torch.cuda.is_available() else None

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index) if torch.cuda.is_available() else None

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for all that the GPU was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(device_index)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Begins a range of NVTX; a domain and a category are not told to it."""
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls it once CUDA is there; at once without a GPU."""
        return torch.cuda._lazy_call(callback) if torch.cuda.is_available() else callback()

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph() if torch.cuda.is_available() else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream) if torch.cuda.is_available() else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        if torch.cuda.is_available():
            graph.replay()
