"""Steps by the user's own optimizer class over 1-D views, one per parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from zeropg.optim.kernels import Group
from zeropg.optim.update.entries import FirstState, State, copied, views
from zeropg.optim.update.own_class import OwnOptions, detached_copy, first_state_of, unhooked_step
from zeropg.optim.update.segments import FlatGroup, held_segments, in_memory, owned_by
from zeropg.optim.update.updater import Move, check_is_per_element, move_entries, owners_that_step, put_entries, runs


class TorchUpdater:
    """Runs the user's own optimizer class over one 1-D view of the master per parameter.

    Per parameter, not per run: torch keeps numbers per parameter (step, NAdam's mu_product, ...).
    ATen's vector loops round tails differently from bodies by up to 1 ulp, so stages agree to that, not bit for bit.
    """

    def __init__(self, flat: FlatGroup, state: State, optimizer: torch.optim.Optimizer, held: Set[int]):
        self.segments, self._stretch_of = held_segments(flat, held)
        self.owned = owned_by(flat, self.segments)
        self._flat = flat
        self._state = state
        self._optimizer = detached_copy(optimizer)
        self._views = [torch.nn.Parameter(in_memory(flat)[s.start : s.stop]) for s in self.segments]
        self._step = unhooked_step(optimizer)
        self.written: list[dict[str, Any]] = []  # what the last step has put into param groups, by their index

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        self.written = []
        gradient = self._flat.grad()
        if gradient is None:
            return
        stepping = owners_that_step(self.segments, self._flat, owners)
        master = in_memory(self._flat)
        for segment, view, owner in zip(self.segments, self._views, stepping, strict=True):
            view.data = master[segment.start : segment.stop]
            view.grad = gradient[segment.start : segment.stop] if owner >= 0 else None
            if view.grad is not None and gradient_factor != 1.0:
                view.grad.mul_(gradient_factor)
        pairs = list(zip(self._views, stepping, strict=True))
        options = OwnOptions(groups, [[view for view, own in pairs if own == index] for index in range(len(groups))])
        self._optimizer.param_groups = options.groups
        self._step(self._optimizer)
        self.written = options.written()
        for segment, view, owner in zip(self.segments, self._views, stepping, strict=True):
            view.grad = None
            if owner >= 0:
                self._state[segment.parameter] = self._optimizer.state[view]
        self._publish(stepping)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        segment = self.segments[index]
        entries = self._state.get(segment.parameter, {})
        check_is_per_element(segment, entries)
        yield from views(entries, start, stop)

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        self._entries(index).update(copied(numbers))

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        entries = self._entries(index)
        if key not in entries:
            entries[key] = in_memory(self._flat).new_zeros(self.segments[index].numel)
        entries[key][start : start + values.numel()].copy_(values)

    def first_state(self, index: int, group: Group) -> FirstState:
        return first_state_of(self._optimizer, group, self._views[index])

    def clear(self) -> None:
        self._optimizer.state.clear()

    def take_over_edits(self, owners: Mapping[int, int], groups: Sequence[Group]) -> None:
        for index, segment in enumerate(self.segments):
            entries = self._state.get(segment.parameter, {})
            if entries is not self._optimizer.state.get(self._views[index], entries if entries else None):
                self._optimizer.state.pop(self._views[index], None)
                self._state.pop(segment.parameter, None)
                if entries and id(segment.parameter) in owners:
                    put_entries(self, index, copied(entries), groups[owners[id(segment.parameter)]])

    def move_state(self, move: Move) -> None:
        move_entries(self._state, self.segments, move)
        for segment, view in zip(self.segments, self._views, strict=True):
            view.data = in_memory(self._flat)[segment.start : segment.stop]

    def _entries(self, index: int) -> dict[str, Any]:
        entries: dict[str, Any] = self._optimizer.state[self._views[index]]
        self._state[self.segments[index].parameter] = entries
        return entries

    def _publish(self, stepping: Sequence[int]) -> None:
        out, master = self._flat.parameter_out, in_memory(self._flat)
        if out is None:
            return
        for first, last in runs(list(zip((min(o, 0) for o in stepping), self._stretch_of, strict=True))):
            start, stop = self.segments[first].start, self.segments[last].stop
            out[start:stop].copy_(master[start:stop])
