"""How a LayerwiseRule steps a sharded model: which kinds of optimizers have one, and the updater that runs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.optim.adafactor import Adafactor
from zeropg.optim.kernels import Group, Kernel, Kernels
from zeropg.optim.layerwise import LayerwiseOptimizer, LayerwiseRule
from zeropg.optim.muon import Muon
from zeropg.optim.peers import Alone, Peers, Piece, ReplicatedPeers, ShardedPeers
from zeropg.optim.update.entries import FACTORS, FirstState, State, is_per_element
from zeropg.optim.update.own_class import first_state_of
from zeropg.optim.update.segments import FlatGroup, Segment, in_memory, segments_of
from zeropg.optim.update.updater import KeptInPlace

# Classes of torch's that step by a rule of ours.
_RULES: dict[type[torch.optim.Optimizer], LayerwiseRule] = {
    torch.optim.Adafactor: Adafactor.rule,
    torch.optim.Muon: Muon.rule,
}


def rule_of(optimizer: torch.optim.Optimizer) -> LayerwiseRule | None:
    """Returns the rule of a layer-wise optimizer, None for others."""
    if isinstance(optimizer, LayerwiseOptimizer):
        return optimizer.rule
    return _RULES.get(type(optimizer))


def kernels_beside(rule: LayerwiseRule) -> Kernels | None:
    """Returns the fused kernel for the parameters that the rule does not take, None where it takes all."""
    if not rule.others_kernel:
        return None
    kernel = _OthersKernel(rule)
    return Kernels([kernel], kernel)


class _OthersKernel(Kernel):
    def __init__(self, rule: LayerwiseRule):
        super().__init__(rule.others_kernel)
        self._rule = rule

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        return super().hyperparameters(self._rule.others_options(group))


class _Layer(NamedTuple):
    """One parameter: `segment` is empty where this rank updates none of it."""

    flat: FlatGroup
    segment: Segment
    counted: slice
    ranges: list[tuple[int, int]]


class LayerwiseUpdater(KeptInPlace):
    """The one updater of the parameters that a rule takes; its segments are what this rank updates of them.

    All ranks take part in the step of every parameter, also one of which they have nothing.
    """

    def __init__(
        self,
        core: _C.ShardedModule,
        flats: Sequence[FlatGroup],
        state: State,
        optimizer: torch.optim.Optimizer,
        rule: LayerwiseRule,
        held: Set[int],
    ):
        self._layers = [layer for flat in flats for layer in _layers_of(flat, core.shards, held)]
        self._own = [layer for layer in self._layers if layer.segment.numel]
        self.segments = [layer.segment for layer in self._own]
        self.owned = {
            layer.segment.name: (layer.segment.offset + layer.counted.start, layer.segment.offset + layer.counted.stop)
            for layer in self._layers
            if layer.counted.start < layer.counted.stop
        }
        self._state = state
        self._optimizer = optimizer
        self._rule = rule
        self._everybody = core.process_group if core.world_size > 1 else None
        self._peers: Peers  # of one copy of the model: replicas find the same
        if core.shards == 1:
            self._peers = Alone()
        elif any(_is_whole(flat) for flat in flats):  # then all are: the stage says it
            self._peers = ReplicatedPeers(core.shard_group)
        else:
            self._peers = ShardedPeers(core.shard_group)

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        flats = {id(layer.flat): layer.flat for layer in self._layers}
        gradients = {key: flat.grad() for key, flat in flats.items()}
        stepping = self._stepping(owners)
        pieces = []
        for layer in stepping:
            segment, gradient = layer.segment, gradients[id(layer.flat)]
            assert gradient is not None  # a parameter in it has one
            own = slice(segment.start, segment.stop)
            state = self._state[segment.parameter] if segment.numel else {}
            pieces.append(
                Piece(
                    segment.parameter,
                    in_memory(layer.flat)[own],
                    gradient[own],
                    segment.offset,
                    segment.offset + segment.numel,
                    groups[owners[id(segment.parameter)]],
                    state,
                    layer.counted,
                    layer.ranges,
                )
            )
        if gradient_factor != 1.0 and pieces:
            torch._foreach_mul_([piece.gradient for piece in pieces], gradient_factor)
        self._rule.update_(pieces, self._peers)
        for layer, piece in zip(stepping, pieces, strict=True):
            if (out := layer.flat.parameter_out) is not None:
                out[layer.segment.start : layer.segment.stop].copy_(piece.weight)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        for key, value in self._state.get(self.segments[index].parameter, {}).items():
            if is_per_element(key, value):
                yield key, start, value[start:stop]

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}
        self._check_factors(self.segments[index], copies)
        for key in copies.keys() & FACTORS:  # a checkpoint's are on the CPU, and of the dtype that it was saved in
            copies[key] = copies[key].to(in_memory(self._own[index].flat))
        self._state[self.segments[index].parameter].update(copies)

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        segment = self.segments[index]
        if key not in self._rule.tensor_state:
            raise ValueError(
                f"[zeropg] optimizer state of {segment.name} has {key!r}, but {type(self._rule).__name__} keeps "
                f"{sorted(self._rule.tensor_state)}; load it into the class and options that it was saved from"
            )
        entries = self._state[segment.parameter]
        if key not in entries:
            entries[key] = in_memory(self._own[index].flat).new_zeros(segment.numel)
        entries[key][start : start + values.numel()].copy_(values)

    def first_state(self, index: int, group: Group) -> FirstState:
        return first_state_of(self._optimizer, group, self.segments[index].parameter)

    def _check_factors(self, segment: Segment, entries: Mapping[str, Any]) -> None:
        expected = self._rule.factor_shapes(segment.parameter)
        for key in entries.keys() & FACTORS:
            if entries[key].shape != expected.get(key):
                wanted = f"one of shape {list(expected[key])}" if key in expected else "none"
                raise ValueError(
                    f"[zeropg] optimizer state of {segment.name} has {key!r} of shape {list(entries[key].shape)}, but "
                    f"{type(self._rule).__name__} keeps {wanted}; load it into the class that it was saved from"
                )

    def _stepping(self, owners: Mapping[int, int]) -> list[_Layer]:
        """What has a gradient. Collective; raises ValueError, on every rank, where ranks differ in that."""
        if not self._layers:
            return []
        has = [
            id(layer.segment.parameter) in owners and layer.flat.has_grad(layer.segment.parameter)
            for layer in self._layers
        ]
        counts = torch.tensor(has, dtype=torch.int32, device=in_memory(self._layers[0].flat).device)
        ranks = 1
        if self._everybody is not None:
            ranks = self._everybody.size()
            dist.all_reduce(counts, group=self._everybody)
        for layer, count in zip(self._layers, counts.tolist(), strict=True):
            if count not in (0, ranks):
                raise ValueError(
                    f"[zeropg] step: {layer.segment.name} has a gradient, or is in a param group, on {count} of "
                    f"{ranks} ranks; set `.grad` and param groups alike on all ranks"
                )
        return [layer for layer, count in zip(self._layers, counts.tolist(), strict=True) if count]


def _layers_of(flat: FlatGroup, shards: int, held: Set[int]) -> Iterator[_Layer]:
    own = {id(segment.parameter): segment for segment in segments_of(flat)}
    counted = {name: (start, stop) for name, _, start, stop in flat.local_shards}
    slice_numel = flat.total_numel // shards
    for names, parameter, offset, numel in flat.slots:
        if id(parameter) in held:
            segment = own.get(id(parameter), Segment(parameter, names[0], 0, 0, 0))
            start, stop = counted.get(names[0], (segment.offset, segment.offset))
            cuts = [min(max(rank * slice_numel - offset, 0), numel) for rank in range(shards + 1)]
            ranges = [(0, numel)] * shards if _is_whole(flat) else list(itertools.pairwise(cuts))
            yield _Layer(flat, segment, slice(start - segment.offset, stop - segment.offset), ranges)


def _is_whole(flat: FlatGroup) -> bool:
    """Whether every rank updates all of it."""
    return flat.master_numel == flat.total_numel
