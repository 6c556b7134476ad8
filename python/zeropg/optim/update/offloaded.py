"""Optimizer steps of flat ranges whose state, and perhaps masters, live in a tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from zeropg._native import _C
from zeropg.optim.kernels import Group, Kernels
from zeropg.optim.packed_state import elements_of, entry_range, with_elements
from zeropg.optim.update.entries import State
from zeropg.optim.update.fused import FusedUpdater
from zeropg.optim.update.segments import FlatGroup
from zeropg.optim.update.updater import Move


class OffloadedUpdater(FusedUpdater):
    """A FusedUpdater whose slots are vectors in a tier. `step` only queues: `OffloadedStep.run` does the work.

    `state[parameter]` shows the numbers (`step`) alone; tensors are read piece by piece (`read`).
    """

    def __init__(self, flat: FlatGroup, state: State, kernels: Kernels, held: Set[int], queue: OffloadedStep):
        super().__init__(flat, state, kernels, held)
        self._queue = queue
        self._vectors: dict[str, _C.TieredVector] = {}
        self._kept: list[list[_C.StateSlot]] = [[] for _ in self.segments]  # each segment's slots that hold something
        self._given: dict[int, dict[str, Any]] = {}  # the dictionaries in `state`, by segment

    def missing_slots(self, owners: Mapping[int, int], groups: Sequence[Group]) -> list[_C.StateSlot]:
        """Returns the slots that the options of `groups` take and that have no room yet."""
        slots: dict[str, _C.StateSlot] = {}
        for index in sorted({owners[id(s.parameter)] for s in self.segments if id(s.parameter) in owners}):
            slots.update((slot.name, slot) for slot in self._settings(groups[index])[2])
        return [slot for name, slot in slots.items() if name not in self._vectors]

    def bytes_of(self, slot: _C.StateSlot) -> int:
        return slot.entries(self._flat.master_numel) * slot.dtype(self._flat.master_dtype).itemsize

    def reserve(self, slots: Sequence[_C.StateSlot]) -> None:
        """Makes room for slots. Raises OSError where there is none."""
        for slot in slots:
            self._vector(slot)

    def move_state(self, move: Move) -> None:
        """It is in the tier already."""

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        gradient = self._flat.grad()
        if gradient is None:
            return
        plan = list(self._plan(owners, groups))
        longest: list[_C.StateSlot] = max((run.slots for run in plan), key=len, default=[])
        runs = [
            _C.StepRun(
                start=self.segments[run.first].start,
                stop=self.segments[run.last].stop,
                optimizer=run.kernel.optimizer,
                hyperparameters=run.hyperparameters,
                step=run.step,
                gradient_factor=gradient_factor,
                slots=len(run.slots),
            )
            for run in plan
        ]
        tiered = self._flat.tiered_master
        flat = _C.TieredFlat(
            tiered_master=tiered,
            master=self._flat.master if tiered is None else None,
            state=[self._vector(slot) for slot in longest],
            gradient=gradient,
            parameter_out=self._flat.parameter_out,
            runs=runs,
        )
        self._queue.add(flat, lambda: self._note_steps(plan))

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        first = self.segments[index].start
        for slot in self._kept[index]:
            vector = self._vectors[slot.name]
            for begin, end in _pieces(first + start, first + stop, vector.chunk_elements):
                if slot.is_packed:
                    values = elements_of(slot, vector.read(*entry_range(slot, begin, end)), begin, end)
                else:
                    values = vector.read(begin, end)
                yield slot.name, begin - first, values

    def clear(self) -> None:
        for vector in self._vectors.values():
            vector.clear()
        self._kept = [[] for _ in self.segments]
        self._shown.clear()
        self._given.clear()
        self._steps = torch.zeros_like(self._steps)  # what is loaded next may be views of the old one

    def take_over_edits(self, owners: Mapping[int, int], groups: Sequence[Group]) -> None:
        """Raises RuntimeError for edits: `state` does not show what they would change."""
        for index, segment in enumerate(self.segments):
            entries, shown = self._state.get(segment.parameter), self._shown.get(index)
            if (entries is not self._given[index] if shown is not None else bool(entries)) or (
                entries and shown and any(entries.get(key) is not value for key, value in shown.items())
            ):
                raise RuntimeError(
                    f"[zeropg] step: optimizer.state of {segment.name} was edited, and with offload_optimizer it is "
                    "in a file; to reset or set it use optimizer.load_state_dict"
                )

    def _vector(self, slot: _C.StateSlot) -> _C.TieredVector:
        if slot.name not in self._vectors:
            what = f"{slot.name} of unit '{self._flat.unit_name or '(root)'}'"
            self._vectors[slot.name] = _C.TieredVector(
                self._queue.offload, what, self._flat.master_numel, self._flat.master_dtype, slot
            )
        return self._vectors[slot.name]

    def _set(self, slot: _C.StateSlot, index: int, start: int, values: torch.Tensor) -> None:
        vector = self._vector(slot)
        begin = self.segments[index].start + start
        if not slot.is_packed:
            vector.write(begin, values)
        elif values.numel():
            first, last = entry_range(slot, begin, begin + values.numel())
            vector.write(first, with_elements(slot, vector.read(first, last), begin, values))

    def _show(self, index: int, slots: Sequence[_C.StateSlot]) -> None:
        self._kept[index] = list(slots)
        self._shown[index] = self._numbers(index)
        self._given[index] = self._state[self.segments[index].parameter] = dict(self._shown[index])


class OffloadedStep:
    """The flat parameters of one step through one tier."""

    def __init__(self, offload: _C.Offload):
        self.offload = offload
        self._flats: list[_C.TieredFlat] = []
        self._notes: list[Any] = []

    def add(self, flat: _C.TieredFlat, note: Any) -> None:
        """Queues a flat parameter; `note` is called when the step is done."""
        self._flats.append(flat)
        self._notes.append(note)

    def clear(self) -> None:
        """Forgets what is queued: of a step that raised before it ran."""
        self._flats, self._notes = [], []

    def run(self) -> None:
        """Steps what is queued. Raises OSError for what the tier refuses; the queue is empty afterwards."""
        flats, notes = self._flats, self._notes
        self.clear()
        _C.pipelined_step(self.offload, flats)
        for note in notes:
            note()


def _pieces(start: int, stop: int, numel: int) -> Iterator[tuple[int, int]]:
    """Cuts [start, stop) at multiples of `numel`; an empty range is one piece."""
    while True:
        end = min(stop, (start // numel + 1) * numel)
        yield start, end
        if end == stop:
            return
        start = end
