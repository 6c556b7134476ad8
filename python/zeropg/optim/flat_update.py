"""How one optimizer step is applied to the flat ranges that a rank owns.

Updaters with one interface: `FusedUpdater` runs zeropg's C++ kernels over runs of neighbouring parameters,
`TorchUpdater` an instance of the user's own optimizer class over 1-D views, one per parameter, `WholeUpdater` the same
over unsharded parameters. All show their state in `state`, the dictionary that the user sees as `optimizer.state`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from zeropg._native import _C
from zeropg.optim.kernels import Group, Kernel, Kernels, kernels_for, new_state, number
from zeropg.optim.packed_state import elements_of, entry_range, pieces_of, with_elements

State = defaultdict[torch.Tensor, Any]
Move = Callable[[torch.Tensor], torch.Tensor]  # a copy of a tensor in other memory

# State of torch's optimizers that is one number per parameter, whatever the parameter's shape.
_SCALARS = frozenset({"step", "mu", "eta", "mu_product"})

# State of layer-wise optimizers that is a tensor of another shape than the parameter's, by key: every rank that has a
# part of the parameter keeps it whole, the same on all.
FACTORS = frozenset({"row_var", "col_var"})


class FlatGroup(Protocol):
    """What the core shows of one flat buffer to the optimizer: `_C.FlatGroup`."""

    # The range that this rank updates; None where it is in a tier.
    @property
    def master(self) -> torch.Tensor | None: ...

    master_start: int  # where that range begins in the flat buffer
    master_numel: int
    master_dtype: torch.dtype
    tiered_master: _C.TieredVector | None
    unit_name: str
    parameter_out: torch.Tensor | None
    total_numel: int  # of the flat buffer; rank r owns the r-th of world_size equal slices
    is_trainable: bool
    segments: Sequence[tuple[torch.Tensor, str, int, int]]  # parameter, name, start, stop in the master
    slots: Sequence[tuple[Sequence[str], torch.Tensor, int, int]]  # names, parameter, offset in the buffer, numel
    local_shards: Sequence[tuple[str, int, int, int]]  # name, first in the master, start, stop in the parameter

    def grad(self) -> torch.Tensor | None: ...
    def has_grad(self, parameter: torch.Tensor) -> bool: ...


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that this rank updates.

    Elements [start, stop) of the flat group's master are elements [offset, offset + stop - start) of the flattened
    parameter.
    """

    parameter: torch.Tensor
    name: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def local(self, key: str, value: Any) -> Any:
        """Returns this segment's share of a whole state entry: [numel] for a tensor of the parameter's shape."""
        if not is_per_element(key, value) or value.shape != self.parameter.shape:
            return value
        return value.detach().reshape(-1)[self.offset : self.offset + self.numel]


def is_per_element(key: str, value: Any) -> bool:
    """Whether a state entry has a value for each element, rather than one number, or a factor, for the parameter."""
    return isinstance(value, torch.Tensor) and key not in _SCALARS and key not in FACTORS


def segments_of(flat: FlatGroup) -> list[Segment]:
    offsets = {id(parameter): offset for _, parameter, offset, _ in flat.slots}
    return [
        Segment(parameter, name, start, stop, flat.master_start + start - offsets[id(parameter)])
        for parameter, name, start, stop in flat.segments
    ]


def held_segments(flat: FlatGroup, held: Set[int]) -> tuple[list[Segment], list[int]]:
    """Returns the segments of the parameters whose ids are in `held`, and the number of the stretch that each is in.

    A stretch is held from its first to its last segment, with the padding between them.
    """
    segments: list[Segment] = []
    stretches: list[int] = []
    is_inside, count = False, 0
    for segment in segments_of(flat):
        was_inside, is_inside = is_inside, id(segment.parameter) in held
        if is_inside:
            count += not was_inside
            segments.append(segment)
            stretches.append(count - 1)
    return segments, stretches


def in_memory(flat: FlatGroup) -> torch.Tensor:
    """Returns the masters of a flat group that has them in memory."""
    master = flat.master
    assert master is not None, "only OffloadedUpdater takes masters in a tier"
    return master.detach()


def owned_by(flat: FlatGroup, segments: Sequence[Segment]) -> dict[str, tuple[int, int]]:
    names = {segment.name for segment in segments}
    return {name: (start, stop) for name, _, start, stop in flat.local_shards if name in names}


class FirstState(NamedTuple):
    """What a first step leaves in a parameter's state, by key; what has a value for each element as a tensor of one."""

    entries: dict[str, Any]
    begins_with_zeros: bool  # whether zeros, and a `step` of 0, stand for no state


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


def _stepping(segments: Sequence[Segment], flat: FlatGroup, owners: Mapping[int, int]) -> list[int]:
    """Index of the param group that steps each segment now, -1 where none does."""
    return [owners.get(id(s.parameter), -1) if flat.has_grad(s.parameter) else -1 for s in segments]


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
        yield from _elements(self._kernels, self._state.get(self.segments[index].parameter, {}), start, stop)

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
            edited = _copied(theirs)  # some are views of what is cleared now
            for key, slot in self._kernels.packed_slots.items():
                if key in theirs and theirs[key] is shown.get(key):
                    edited[key] = _unpacked(slot, edited[key], 0, segment.numel)
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
        stepping = _stepping(self.segments, self._flat, owners)
        counts = [int(count) for count in self._steps.tolist()]
        settings = {owner: self._settings(groups[owner]) for owner in set(stepping) if owner >= 0}
        has_state = [count > 0 or index in self._shown for index, count in enumerate(counts)]
        for first, last in _runs(list(zip(stepping, self._stretch_of, counts, has_state, strict=True))):
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
            (self.segments[first].start, self.segments[last].stop)
            for first, last in _runs(self._stretch_of, skipped=-1)
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
        self._step = _unhooked_step(optimizer)

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        gradient = self._flat.grad()
        if gradient is None:
            return
        stepping = _stepping(self.segments, self._flat, owners)
        master = in_memory(self._flat)
        for segment, view, owner in zip(self.segments, self._views, stepping, strict=True):
            view.data = master[segment.start : segment.stop]
            view.grad = gradient[segment.start : segment.stop] if owner >= 0 else None
            if view.grad is not None and gradient_factor != 1.0:
                view.grad.mul_(gradient_factor)
        self._optimizer.param_groups = [
            {**group, "params": [view for view, owner in zip(self._views, stepping, strict=True) if owner == index]}
            for index, group in enumerate(groups)
        ]
        self._step(self._optimizer)
        for segment, view, owner in zip(self.segments, self._views, stepping, strict=True):
            view.grad = None
            if owner >= 0:
                self._state[segment.parameter] = self._optimizer.state[view]
        self._publish(stepping)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        segment = self.segments[index]
        entries = self._state.get(segment.parameter, {})
        _check_is_per_element(segment, entries)
        yield from _views(entries, start, stop)

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        self._entries(index).update(_copied(numbers))

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
                    put_entries(self, index, _copied(entries), groups[owners[id(segment.parameter)]])

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
        for first, last in _runs(list(zip((min(o, 0) for o in stepping), self._stretch_of, strict=True))):
            start, stop = self.segments[first].start, self.segments[last].stop
            out[start:stop].copy_(master[start:stop])


class WholeUpdater:
    """Runs the user's own optimizer class over parameters that `fully_shard(ignored_params=...)` left whole."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], state: State, optimizer: torch.optim.Optimizer, *, owns: bool
    ):
        self.segments = [Segment(p, name, 0, p.numel(), 0) for name, p in parameters.items()]
        self.owned = {s.name: (0, s.numel) for s in self.segments if owns}
        self._optimizer = detached_copy(optimizer)
        self._optimizer.state = state
        self._kernels = kernels_for(optimizer)  # what its class steps by, if state may be packed
        self._step = _unhooked_step(optimizer)

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        mine = [s.parameter for s in self.segments if s.parameter.grad is not None and id(s.parameter) in owners]
        if mine and gradient_factor != 1.0:
            torch._foreach_mul_([p.grad for p in mine if p.grad is not None], gradient_factor)
        self._optimizer.param_groups = [
            {**group, "params": [p for p in mine if owners.get(id(p)) == index]} for index, group in enumerate(groups)
        ]
        self._step(self._optimizer)

    def zero_gradients(self) -> None:
        if gradients := [s.parameter.grad for s in self.segments if s.parameter.grad is not None]:
            torch._foreach_zero_(gradients)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        segment = self.segments[index]
        entries = self._optimizer.state.get(segment.parameter, {})
        if self._kernels is None:
            _check_is_per_element(segment, entries)
        yield from _elements(self._kernels, entries, start, stop)

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        self._optimizer.state[self.segments[index].parameter].update(_copied(numbers))

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        parameter = self.segments[index].parameter
        entries = self._optimizer.state[parameter]
        if key not in entries:
            entries[key] = torch.zeros(parameter.shape, dtype=values.dtype, device=parameter.device)
        entries[key].view(-1)[start : start + values.numel()].copy_(values)

    def first_state(self, index: int, group: Group) -> FirstState:
        first = first_state_of(self._optimizer, group, self.segments[index].parameter)
        packed = {} if self._kernels is None else self._kernels.packed_slots
        for key, value in first.entries.items():
            if key in packed and value.dtype == torch.uint8:
                first.entries[key] = torch.zeros(1, dtype=torch.bfloat16)
        return first

    def clear(self) -> None:
        for segment in self.segments:
            self._optimizer.state.pop(segment.parameter, None)

    def take_over_edits(self, owners: Mapping[int, int], groups: Sequence[Group]) -> None:
        """The user's dictionary is the optimizer's."""

    def move_state(self, move: Move) -> None:
        move_entries(self._optimizer.state, self.segments, move)


def _unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The class's own step: torch wraps it with hooks and a profiler range, which the outer optimizer runs already."""
    step = type(optimizer).step
    wrapped: Callable[[torch.optim.Optimizer], Any] = getattr(step, "__wrapped__", step)
    return wrapped if getattr(step, "hooked", False) else step


def detached_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and attributes with its own, empty state and without hooks."""
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name in vars(copy):
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(copy, name, OrderedDict())
    copy.state = defaultdict(dict)
    copy.param_groups = []
    return copy


def first_state_of(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> FirstState:
    """Steps one element, of zero gradient, by the optimizer's own class; the optimizer stays as it is.

    parameter: whose number of dimensions, dtype and device count.
    """
    element = torch.nn.Parameter(torch.zeros([1] * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
    element.grad = torch.zeros_like(element)
    copy = detached_copy(optimizer)
    copy.param_groups = [{**group, "params": [element]}]
    with torch.no_grad():
        _unhooked_step(optimizer)(copy)
    entries = {key: value for key, value in copy.state.get(element, {}).items() if value is not None}
    tensors = {key: value for key, value in entries.items() if is_per_element(key, value)}
    is_zero = all(not int(value.count_nonzero()) for value in tensors.values())
    only_counts = entries.keys() - tensors.keys() <= {"step"} and not group.get("dampening")
    return FirstState(entries, is_zero and only_counts)


def _check_is_per_element(segment: Segment, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if is_per_element(key, value) and value.numel() != segment.numel:
            raise ValueError(
                f"[zeropg] the optimizer's state {key!r} of {segment.name} is a tensor of {value.numel()} elements; "
                f"expected {segment.numel}, one for each element that this rank updates. What an elementwise optimizer "
                "keeps beside these must be Python numbers, or a tensor called 'step'"
            )


def _views(entries: Mapping[str, Any], start: int, stop: int | None) -> Iterator[tuple[str, int, torch.Tensor]]:
    for key, value in entries.items():
        if is_per_element(key, value):
            yield key, start, value.reshape(-1)[start:stop]


def _elements(
    kernels: Kernels | None, entries: Mapping[str, Any], start: int, stop: int
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """As `_views`, also of packed state: bfloat16, in pieces."""
    packed = {} if kernels is None else kernels.packed_slots
    for key, _, values in _views(entries, 0, None):
        if key in packed and values.dtype == torch.uint8:
            for begin, end in pieces_of(start, stop):
                yield key, begin, _unpacked(packed[key], values, begin, end)
        else:
            yield key, start, values[start:stop]


def _unpacked(slot: _C.StateSlot, entries: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a parameter whose packed state is `entries`."""
    first, last = entry_range(slot, start, stop)
    return elements_of(slot, entries[first:last], start, stop)


def _copied(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}


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


def _runs(keys: Sequence[Any], skipped: Any = None) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of each stretch of equal keys; a key (-1, ...) or `skipped` belongs to no run."""
    first = 0
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[first]:
            key = keys[first]
            if key != skipped and not (isinstance(key, tuple) and key[0] < 0):
                yield first, index - 1
            first = index
