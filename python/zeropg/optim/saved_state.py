"""The state of a sharded optimizer that this rank saves: over all ranks each element once. No communication.

Nothing is copied: tensors are live views, or buffers that the next piece overwrites, and are only read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zeropg.optim.kernels import Group
from zeropg.optim.update.entries import FACTORS, State, is_per_element
from zeropg.optim.update.segments import Segment
from zeropg.optim.update.updater import Updater


class StateShard(NamedTuple):
    """Optimizer state `key` of elements [start, stop) of the flattened parameter `name`; tensor: [stop - start]."""

    name: str
    key: str
    tensor: torch.Tensor
    start: int
    stop: int


class Factor(NamedTuple):
    """Optimizer state `key` of the parameter `name`, whole. is_first: whether this rank is the one that saves it."""

    name: str
    key: str
    tensor: torch.Tensor
    is_first: bool


def state_shards(updaters: Sequence[Updater]) -> Iterator[StateShard]:
    """Yields state per element, in pieces; those of one (name, key) in order."""
    for updater, index, start, stop in _saved(updaters):
        segment = updater.segments[index]
        for key, at, values in updater.read(index, start - segment.offset, stop - segment.offset):
            begin = segment.offset + at
            yield StateShard(segment.name, key, values, begin, begin + values.numel())


def state_keys(updaters: Sequence[Updater]) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yields (parameter name, key, dtype) of what `state_shards` yields, without reading it."""
    for updater, index, start, _ in _saved(updaters):
        segment = updater.segments[index]
        at = start - segment.offset
        yield from ((segment.name, key, empty.dtype) for key, _, empty in updater.read(index, at, at))


def state_numbers(updaters: Sequence[Updater], state: State) -> Iterator[tuple[str, str, Any]]:
    """Yields (parameter name, key, value) of state that is one number per parameter, such as `step`."""
    for segment, _ in _saved_segments(updaters):
        for key, value in state.get(segment.parameter, {}).items():
            if not is_per_element(key, value) and key not in FACTORS:
                yield segment.name, key, value.clone() if isinstance(value, torch.Tensor) else value


def state_factors(updaters: Sequence[Updater], state: State) -> Iterator[Factor]:
    """Yields the state that is a tensor of another shape than the parameter's: see `FACTORS`."""
    for segment, start in _saved_segments(updaters):
        for key, value in state.get(segment.parameter, {}).items():
            if key in FACTORS:
                yield Factor(segment.name, key, value, start == 0)


def put_shards(
    places: Iterable[tuple[Updater, int, Group]],
    shards: Iterable[StateShard],
    numbers: Iterable[tuple[str, str, Any]],
) -> None:
    """Sets the state of updaters that have none.

    places: as (updater, index of a segment, its param group). numbers: and factors, as (parameter name, key, value).

    Raises ValueError as ShardedOptimizer.load_local_state.
    """
    by_name: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, key, value in numbers:
        by_name[name][key] = value
    place_of = {updater.segments[index].name: (updater, index, group) for updater, index, group in places}
    for name, (updater, index, group) in place_of.items():
        if name in by_name:
            updater.put_numbers(index, by_name[name], group)
    missing: dict[tuple[str, str], int] = {}
    for name, key, tensor, start, stop in shards:
        if name not in place_of:
            continue
        updater, index, group = place_of[name]
        segment = updater.segments[index]
        first, last = max(start, segment.offset), min(stop, segment.offset + segment.numel)
        if first >= last:
            continue
        if tensor.shape != (stop - start,):
            raise ValueError(
                f"[zeropg] load_local_state: {key} of {name} has shape {list(tensor.shape)}, expected "
                f"[{stop - start}] for its elements {start} to {stop}"
            )
        updater.write(index, key, first - segment.offset, tensor[first - start : last - start], group)
        missing[name, key] = missing.get((name, key), segment.numel) - (last - first)
    for (name, key), numel in missing.items():
        if numel:
            raise ValueError(
                f"[zeropg] load_local_state: the pieces of {key} of {name} miss the elements of this rank by "
                f"{numel}, expected each once; local_ranges() says which they are"
            )


def _saved(updaters: Sequence[Updater]) -> Iterator[tuple[Updater, int, int, int]]:
    """Yields (updater, index of a segment, first and last element of the parameter) of what this rank saves."""
    for updater in updaters:
        for index, segment in enumerate(updater.segments):
            start, stop = updater.owned.get(segment.name, (0, 0))
            if start < stop:
                yield updater, index, start, stop


def _saved_segments(updaters: Sequence[Updater]) -> Iterator[tuple[Segment, int]]:
    for updater, index, start, _ in _saved(updaters):
        yield updater.segments[index], start
