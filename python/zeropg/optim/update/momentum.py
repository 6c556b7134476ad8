"""How an optimizer that averages momenta steps a sharded model: whole momenta, and this rank's part of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from zeropg._native import _C
from zeropg.optim.kernels import Group
from zeropg.optim.momentum_exchange import MomentumExchange
from zeropg.optim.momentum_optimizer import INSTEAD, MomentumOptimizer
from zeropg.optim.part import Part
from zeropg.optim.update.entries import FirstState, State, is_per_element
from zeropg.optim.update.segments import FlatGroup, Segment, in_memory
from zeropg.optim.update.updater import KeptInPlace


class Place(NamedTuple):
    """Elements [start, stop) of a parameter, which this rank updates, begin at element `first` of the flat's master."""

    flat: FlatGroup
    first: int
    start: int
    stop: int


class MomentumUpdater(KeptInPlace):
    """The one updater of a model that `OneBitAdam`, `OneBitLamb` or `DGC` trains; its segments are whole parameters."""

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        state: State,
        optimizer: MomentumOptimizer,
        exchange: MomentumExchange,
        held: Set[int],
    ) -> None:
        self.segments: list[Segment] = []
        self.owned: dict[str, tuple[int, int]] = {}
        self._places: list[Place] = []
        self._state = state
        self._optimizer = optimizer
        self._exchange = exchange
        for flat in flats:
            for names, parameter, offset, numel in flat.slots:
                if id(parameter) in held:
                    start = min(max(flat.master_start - offset, 0), numel)
                    stop = min(max(flat.master_start + flat.master_numel - offset, start), numel)
                    first = offset + start - flat.master_start if start < stop else 0
                    self.segments.append(Segment(parameter, names[0], 0, numel, 0))
                    self._places.append(Place(flat, first, start, stop))
            names_held = {segment.name for segment in self.segments}
            self.owned |= {name: (start, stop) for name, _, start, stop in flat.local_shards if name in names_held}

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        parts: list[Part] = []
        stepped: list[Place] = []
        seen: set[int] = set()
        for segment, place in zip(self.segments, self._places, strict=True):
            if id(place.flat) not in seen:
                seen.add(id(place.flat))
                place.flat.grad()  # takes over what the user did to `.grad`
            gradient = segment.parameter.grad
            owner = owners.get(id(segment.parameter), -1)
            if owner < 0 or gradient is None:
                continue
            weight = in_memory(place.flat)[place.first : place.first + place.stop - place.start]
            state = self._state[segment.parameter]
            whole = gradient.detach().reshape(-1)
            parts.append(Part(segment.parameter, weight, whole, place.start, place.stop, groups[owner], state))
            stepped.append(place)
        self._optimizer.update(parts, gradient_factor, self._exchange)
        for part, place in zip(parts, stepped, strict=True):
            if (out := place.flat.parameter_out) is not None:
                out[place.first : place.first + part.weight.numel()].copy_(part.weight)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        segment, place = self.segments[index], self._places[index]
        for key, value in self._state.get(segment.parameter, {}).items():
            if is_per_element(key, value) and key not in self._optimizer.own_state:
                begin = 0 if value.numel() == segment.numel else place.start
                yield key, start, value.reshape(-1)[start - begin : stop - begin]

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}
        self._state[self.segments[index].parameter].update(copies)

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        segment, place = self.segments[index], self._places[index]
        if key not in self._optimizer.tensor_state:
            raise ValueError(
                f"[zeropg] optimizer state of {segment.name} has {key!r}, but {type(self._optimizer).__name__} keeps "
                f"{sorted(self._optimizer.tensor_state)}; load it into the class that it was saved from"
            )
        begin, end = (0, segment.numel) if key in self._optimizer.whole_state else (place.start, place.stop)
        entries = self._state[segment.parameter]
        if key not in entries:
            entries[key] = in_memory(place.flat).new_zeros(end - begin)
        first, last = max(start, begin), min(start + values.numel(), end)
        if first < last:
            entries[key][first - begin : last - begin].copy_(values[first - start : last - start])

    def put(self, index: int, entries: Mapping[str, Any], group: Group) -> None:
        """Sets the state of segment `index` from whole tensors, or from what this rank keeps of them."""
        segment, place = self.segments[index], self._places[index]
        tensors = {key: value for key, value in entries.items() if is_per_element(key, value)}
        self.put_numbers(index, {key: value for key, value in entries.items() if key not in tensors}, group)
        for key, value in tensors.items():
            start = 0 if value.numel() == segment.numel else place.start
            if value.numel() not in (segment.numel, place.stop - place.start):
                raise ValueError(
                    f"[zeropg] optimizer state {key} of {segment.name} has {value.numel()} elements, expected "
                    f"{segment.numel}, or the {place.stop - place.start} that this rank owns; use "
                    "zeropg.load_checkpoint to load state of another world size"
                )
            self.write(index, key, start, value.detach().reshape(-1), group)

    def first_state(self, index: int, group: Group) -> FirstState:
        raise NotImplementedError(
            f"[zeropg] {type(self._optimizer).__name__} keeps what ranks owe each other beside its state per element; "
            "use zeropg.save_checkpoint"
        )


def make_exchange(optimizer: MomentumOptimizer, core: _C.ShardedModule, model: torch.nn.Module) -> MomentumExchange:
    """What the steps over a sharded model communicate by.

    Raises NotImplementedError for stages that shard gradients and what else does not go together with averaged momenta,
    ValueError for compressed gradients, a group of another backend, and parameters that the optimizer does not hold.
    """
    who = f"shard_optimizer({type(optimizer).__name__})"
    if optimizer.exchange is not None:
        raise RuntimeError(f"[zeropg] {who}: this optimizer has a model already; make one for each model")
    if core.stage > 1:
        raise NotImplementedError(f"[zeropg] {who}: the model has stage {core.stage}; {INSTEAD}")
    if core.is_compressed:
        raise ValueError(
            f"[zeropg] {who}: fully_shard has compression, a codec with an optimizer that it spoils: gradients would "
            "be encoded, and momenta again; leave compression away, the optimizer has its own"
        )
    if optimizer.warmup_codec is not None:
        raise NotImplementedError(
            f"[zeropg] {who}: warmup_codec works with DistributedDataParallel; a sharded model averages in fp32 during "
            "warm-up"
        )
    optimizer.check_parameters(model, who)
    sharded = {id(parameter) for flat in core.flat_groups for _, parameter, _, _ in flat.slots}
    if ignored := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in sharded]:
        raise ValueError(
            f"[zeropg] {who}: {', '.join(ignored[:3])} of ignored_params are averaged by nobody; freeze them, or shard "
            "them too"
        )
    weights_over = core.shard_group if core.stage > 0 else None
    return optimizer.make_exchange(model, core.process_group, weights_over=weights_over)
