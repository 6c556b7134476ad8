"""The state that a sharded optimizer keeps on this rank, parameter by parameter, also before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from zeropg.optim.kernels import Group
from zeropg.optim.update.entries import FirstState, State, is_per_element
from zeropg.optim.update.updater import Updater

# Elements [start, stop) of the flattened parameter, of the state of one key; a live view or a copy.
Read = Callable[[str, int, int], torch.Tensor]


class KeptState(NamedTuple):
    """The state of a parameter that this rank updates elements of."""

    name: str
    kept: tuple[int, int]  # elements [start, stop) of the flattened parameter: what this rank updates
    owned: tuple[int, int]  # what it saves: over the ranks each element once
    dtypes: dict[str, torch.dtype]  # of what there is per element, by key
    numbers: dict[str, Any]  # what else there is
    first: FirstState
    read: Read


def kept_states(places: Iterable[tuple[Updater, int, Group]], state: State) -> Iterator[KeptState]:
    """Yields what this rank keeps; of frozen parameters only where there is some. Does not communicate.

    places: the segments by their updaters, each with the options of its param group.

    Raises NotImplementedError for an optimizer that keeps more than this.
    """
    for updater, index, group in places:
        segment = updater.segments[index]
        entries: Mapping[str, Any] = state.get(segment.parameter, {})
        if segment.numel == 0 or not (segment.parameter.requires_grad or entries):
            continue
        yield KeptState(
            segment.name,
            (segment.offset, segment.offset + segment.numel),
            updater.owned.get(segment.name, (0, 0)),
            {key: empty.dtype for key, _, empty in updater.read(index, 0, 0)},
            {k: v for k, v in entries.items() if v is not None and not is_per_element(k, v)},
            updater.first_state(index, group),
            _reader(updater, index, segment.offset),
        )


def _reader(updater: Updater, index: int, offset: int) -> Read:
    def read(key: str, start: int, stop: int) -> torch.Tensor:
        whole: torch.Tensor | None = None
        for found, first, values in updater.read(index, start - offset, stop - offset):
            if found == key:
                if values.numel() == stop - start:
                    return values
                whole = values.new_empty(stop - start) if whole is None else whole
                at = first + offset - start
                whole[at : at + values.numel()] = values  # the next piece may overwrite it
        assert whole is not None, key
        return whole

    return read
