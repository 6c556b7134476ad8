"""Steps by zeropg's C++ kernels over runs of neighbouring parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from zeropg._native import _C
from zeropg.optim.kernels import Group, Kernel, Kernels, new_state, number
from zeropg.optim.packed_state import entry_range, with_elements
from zeropg.optim.update.entries import FirstState, State, copied, elements, is_per_element, unpacked
from zeropg.optim.update.segments import FlatGroup, held_segments, in_memory, owned_by
from zeropg.optim.update.updater import Move, owners_that_step, put_entries, runs


class Run(NamedTuple):
    """Segments `first` to `last` of an updater, stepped alike for the `step`-th time."""

    first: int
    last: int
    kernel: Kernel
    hyperparameters: dict[str, float]
    slots: list[_C.StateSlot]
    step: int


class FusedUpdater:
    """Runs a C++ kernel once per run: neighbours of the same param group and step count, padding included.

    Padding has zero gradients and zero state, so it stays zero (with eps=0 it becomes NaN, which nobody reads).
    A slot has one tensor per stretch of held segments, so what other optimizers hold takes no memory here. Kernels of
    all param groups keep their state alike (`Kernel.storage`); segments begin where blocks of state do.
    """

    def __init__(self, flat: FlatGroup, state: State, kernels: Kernels, held: Set[int]):
        self.segments, self._stretch_of = held_segments(flat, held)
        self.owned = owned_by(flat, self.segments)
        self._flat = flat
        self._state = state
        self._kernels = kernels
        self._slots: dict[tuple[str, int], torch.Tensor] = {}  # by name and stretch
        self._formats: dict[str, _C.StateSlot] = {}  # of these, by name
        self._bounds = self._bounds_of_stretches()
        self._shown: dict[int, dict[str, Any]] = {}  # by segment: what `_state` has, unless the user has edited it
        # One number per segment; `state[p]["step"]` of torch's layout is a view of it.
        is_double = torch.get_default_dtype() == torch.float64
        self._steps = torch.zeros(len(self.segments), dtype=torch.float64 if is_double else torch.float32)

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        gradient = self._flat.grad()
        if gradient is None:
            return
        plan = list(self._plan(owners, groups))
        master, parameter_out = in_memory(self._flat), self._flat.parameter_out
        for run in plan:
            stretch = self._stretch_of[run.first]
            begin = self._bounds[stretch][0]
            run.kernel.optimizer.step(
                self._cut(master, stretch),
                self._cut(gradient, stretch),
                [self._slot(slot, stretch) for slot in run.slots],
                None if parameter_out is None else self._cut(parameter_out, stretch),
                range=(self.segments[run.first].start - begin, self.segments[run.last].stop - begin),
                hyperparameters=run.hyperparameters,
                step=run.step,
                gradient_factor=gradient_factor,
            )
        self._note_steps(plan)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        yield from elements(self._kernels, self._state.get(self.segments[index].parameter, {}), start, stop)

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        given = {key: value for key, value in numbers.items() if value is not None}
        self._slots_for(index, group, given.keys() - {"step"})
        self._steps[index] = number(given.get("step", 0))

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        slots = self._slots_for(index, group, {key})
        (slot,) = (slot for slot in slots if slot.name == key)
        self._set(slot, index, start, values)
        if self._steps[index] == 0 and not self._kernels.default.counts_steps:
            self._steps[index] = 1  # state without a count says that the first step is over
        self._show(index, slots)

    def first_state(self, index: int, group: Group) -> FirstState:
        _, hyperparameters, slots = self._settings(group)
        entries = {key: torch.zeros_like(value) for key, value in self._numbers(index).items()} if slots else {}
        entries.update((slot.name, torch.zeros(1, dtype=self._element_dtype(slot))) for slot in slots)
        first_alone = ("dampening", "initial_")  # what makes a first step another one than a step over zeros
        return FirstState(entries, not any(v for key, v in hyperparameters.items() if key.startswith(first_alone)))

    def clear(self) -> None:
        self._slots.clear()  # not zeroed in place: what is loaded next may be views of them
        self._shown.clear()
        self._steps = torch.zeros_like(self._steps)

    def take_over_edits(self, owners: Mapping[int, int], groups: Sequence[Group]) -> None:
        for index, segment in enumerate(self.segments):
            there, shown = self._state.get(segment.parameter, {}), self._shown.get(index, {})
            is_shown = all(there.get(key) is value for key, value in shown.items())
            if id(segment.parameter) not in owners or (is_shown and len(there) == len(shown)):
                continue
            group = groups[owners[id(segment.parameter)]]
            known = {"step", *(slot.name for slot in self._settings(group)[2])}
            theirs = {key: there[key] for key in there.keys() & known if there[key] is not None}
            if is_shown and theirs.keys() <= shown.keys():
                continue  # with notes of the user's own
            edited = copied(theirs)  # some are views of what is cleared now
            for key, slot in self._kernels.packed_slots.items():
                if key in theirs and theirs[key] is shown.get(key):
                    edited[key] = unpacked(slot, edited[key], 0, segment.numel)
            notes = {key: value for key, value in there.items() if key not in known}
            for key, value in shown.items():
                if is_per_element(key, value):
                    value.zero_()
            self._shown.pop(index, None)
            self._state.pop(segment.parameter, None)
            self._steps[index] = 0
            put_entries(self, index, edited, group)
            if notes:
                self._state[segment.parameter].update(notes)

    def move_state(self, move: Move) -> None:
        for slot in self._slots.values():
            slot.data = move(slot)
        for index, shown in self._shown.items():
            for key, value in shown.items():
                if is_per_element(key, value):
                    value.data = self._of_segment(self._formats[key], index)

    def _plan(self, owners: Mapping[int, int], groups: Sequence[Group]) -> Iterator[Run]:
        """Yields what steps now, and how."""
        stepping = owners_that_step(self.segments, self._flat, owners)
        counts = [int(count) for count in self._steps.tolist()]
        settings = {owner: self._settings(groups[owner]) for owner in set(stepping) if owner >= 0}
        has_state = [count > 0 or index in self._shown for index, count in enumerate(counts)]
        for first, last in runs(list(zip(stepping, self._stretch_of, counts, has_state, strict=True))):
            kernel, hyperparameters, slots = settings[stepping[first]]
            if has_state[first]:
                hyperparameters = kernel.going_on(hyperparameters)
            yield Run(first, last, kernel, hyperparameters, slots, counts[first] + 1)

    def _note_steps(self, plan: Sequence[Run]) -> None:
        for run in plan:
            if run.slots:
                self._steps[run.first : run.last + 1] += 1
                for index in range(run.first, run.last + 1):
                    self._show(index, run.slots)

    def _settings(self, group: Group) -> tuple[Kernel, dict[str, float], list[_C.StateSlot]]:
        kernel = self._kernels.of(group)
        hyperparameters = kernel.hyperparameters(group)
        return kernel, hyperparameters, kernel.optimizer.state_slots(hyperparameters)

    def _slots_for(self, index: int, group: Group, keys: Set[str]) -> list[_C.StateSlot]:
        """Returns the state slots of a segment, which `keys` must be among."""
        kernel, _, slots = self._settings(group)
        names = {slot.name for slot in slots}
        if unknown := keys - names:
            raise ValueError(
                f"[zeropg] optimizer state of {self.segments[index].name} has {sorted(unknown)}, but {kernel.name} "
                f"with these param_groups keeps {sorted(names)}; load it into the class and options that it was saved "
                "from"
            )
        return slots

    def _bounds_of_stretches(self) -> list[tuple[int, int]]:
        """Where each stretch begins and ends in the master."""
        if len(self.segments) == len(self._flat.segments):
            return [(0, self._flat.master_numel)]
        return [
            (self.segments[first].start, self.segments[last].stop) for first, last in runs(self._stretch_of, skipped=-1)
        ]

    def _cut(self, flat: torch.Tensor, stretch: int) -> torch.Tensor:
        start, stop = self._bounds[stretch]
        return flat if stop - start == flat.numel() else flat[start:stop]

    def _slot(self, slot: _C.StateSlot, stretch: int) -> torch.Tensor:
        if (slot.name, stretch) not in self._slots:
            self._formats[slot.name] = slot
            start, stop = self._bounds[stretch]
            self._slots[slot.name, stretch] = new_state(slot, stop - start, self._flat.master_dtype)
        return self._slots[slot.name, stretch]

    def _of_segment(self, slot: _C.StateSlot, index: int) -> torch.Tensor:
        """The entries of a segment."""
        segment, stretch = self.segments[index], self._stretch_of[index]
        begin = self._bounds[stretch][0]
        return self._slot(slot, stretch)[slot.entries(segment.start - begin) : slot.entries(segment.stop - begin)]

    def _set(self, slot: _C.StateSlot, index: int, start: int, values: torch.Tensor) -> None:
        entries = self._of_segment(slot, index)
        if not slot.is_packed:
            entries[start : start + values.numel()].copy_(values)
        elif values.numel():
            first, last = entry_range(slot, start, start + values.numel())
            entries[first:last] = with_elements(slot, entries[first:last], start, values)

    def _element_dtype(self, slot: _C.StateSlot) -> torch.dtype:
        return torch.bfloat16 if slot.is_packed else slot.dtype(self._flat.master_dtype)

    def _numbers(self, index: int) -> dict[str, Any]:
        return {"step": self._steps[index]} if self._kernels.default.counts_steps else {}

    def _show(self, index: int, slots: Sequence[_C.StateSlot]) -> None:
        segment = self.segments[index]
        if slots[-1].name not in self._state.get(segment.parameter, ()):
            views = {slot.name: self._of_segment(slot, index) for slot in slots}
            self._shown[index] = self._numbers(index) | views
            self._state[segment.parameter] = dict(self._shown[index])
