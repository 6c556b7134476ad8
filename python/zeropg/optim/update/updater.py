"""The interface of updaters, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from zeropg.optim.kernels import Group
from zeropg.optim.update.entries import FirstState, State, is_per_element
from zeropg.optim.update.segments import FlatGroup, Segment

Move = Callable[[torch.Tensor], torch.Tensor]  # a copy of a tensor in other memory


class Updater(Protocol):
    """Applies steps to a set of parameters and holds their optimizer state."""

    segments: list[Segment]
    # Which elements of a flattened parameter this rank saves: each on one rank, also where all update everything.
    owned: dict[str, tuple[int, int]]

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        """Updates every segment that has a gradient; owners maps id(parameter) to an index of groups."""

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yields (key, first element, values) of the state per element of elements [start, stop) of segment `index`.

        In pieces, in order within a key; each is valid until the next is asked for. Of an empty range, one empty piece
        per key, without reading: it shows the dtype.
        """

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        """Sets the state of segment `index` that is not per element, as torch keeps it; before any `write` to it."""

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        """Copies `values` into elements [start, start + len(values)) of segment `index`; the rest of a key is zero.

        Raises ValueError for a key that the optimizer does not keep with the options of `group`.
        """

    def first_state(self, index: int, group: Group) -> FirstState:
        """Returns what a first step with the options of `group` leaves in the state of segment `index`.

        Raises NotImplementedError where there is more to it than that.
        """

    def clear(self) -> None:
        """Forgets all state, as before the first step."""

    def take_over_edits(self, owners: Mapping[int, int], groups: Sequence[Group]) -> None:
        """Makes what the user has put into `state`, or taken from it, since the last step this updater's own."""

    def move_state(self, move: Move) -> None:
        """Replaces the memory of the state per element by what `move` returns, and follows masters that have moved.

        Tensors in `state` stay the same objects.
        """


def move_entries(state: State, segments: Sequence[Segment], move: Move) -> None:
    """Updater.move_state where each entry has memory of its own."""
    for segment in segments:
        for key, value in state.get(segment.parameter, {}).items():
            if is_per_element(key, value):
                value.data = move(value.data)


class KeptInPlace:
    """Updaters whose state is the dictionary that the user sees, so that edits of it need no taking over."""

    segments: list[Segment]
    _state: State

    def clear(self) -> None:
        for segment in self.segments:
            self._state.pop(segment.parameter, None)

    def take_over_edits(self, owners: Mapping[int, int], groups: Sequence[Group]) -> None:
        """The user's dictionary is the optimizer's."""

    def move_state(self, move: Move) -> None:
        move_entries(self._state, self.segments, move)


def put_entries(updater: Updater, index: int, entries: Mapping[str, Any], group: Group) -> None:
    """Sets the state of a segment that has none: as torch keeps it, or this rank's part of that."""
    if not entries:
        return
    segment = updater.segments[index]
    entries = {key: segment.local(key, value) for key, value in entries.items()}
    tensors = {key: value for key, value in entries.items() if is_per_element(key, value)}
    updater.put_numbers(index, {key: value for key, value in entries.items() if key not in tensors}, group)
    for key, value in tensors.items():
        updater.write(index, key, 0, checked(segment, key, value.detach().reshape(-1)), group)


def checked(segment: Segment, key: str, value: torch.Tensor) -> torch.Tensor:
    """Returns `value` [numel of the segment], flat; raises ValueError for another shape."""
    if value.shape != (segment.numel,):
        raise ValueError(
            f"[zeropg] optimizer state {key} of {segment.name} has shape {list(value.shape)}, expected "
            f"[{segment.numel}], the part of the parameter that this rank owns; use zeropg.load_checkpoint to load "
            "state of another world size"
        )
    return value


def check_is_per_element(segment: Segment, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if is_per_element(key, value) and value.numel() != segment.numel:
            raise ValueError(
                f"[zeropg] the optimizer's state {key!r} of {segment.name} is a tensor of {value.numel()} elements; "
                f"expected {segment.numel}, one for each element that this rank updates. What an elementwise optimizer "
                "keeps beside these must be Python numbers, or a tensor called 'step'"
            )


def owners_that_step(segments: Sequence[Segment], flat: FlatGroup, owners: Mapping[int, int]) -> list[int]:
    """Index of the param group that steps each segment now, -1 where none does."""
    return [owners.get(id(s.parameter), -1) if flat.has_grad(s.parameter) else -1 for s in segments]


def runs(keys: Sequence[Any], skipped: Any = None) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of each stretch of equal keys; a key (-1, ...) or `skipped` belongs to no run."""
    first = 0
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[first]:
            key = keys[first]
            if key != skipped and not (isinstance(key, tuple) and key[0] < 0):
                yield first, index - 1
            first = index
