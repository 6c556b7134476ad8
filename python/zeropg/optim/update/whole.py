"""Steps of unsharded parameters, by the user's own optimizer class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zeropg.optim.kernels import Group, kernels_for
from zeropg.optim.update.entries import FirstState, State, copied, elements
from zeropg.optim.update.own_class import OwnOptions, detached_copy, first_state_of, unhooked_step
from zeropg.optim.update.segments import Segment
from zeropg.optim.update.updater import KeptInPlace, check_is_per_element


class WholeUpdater(KeptInPlace):
    """Runs the user's own optimizer class over parameters that `fully_shard(ignored_params=...)` left whole."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], state: State, optimizer: torch.optim.Optimizer, *, owns: bool
    ):
        self.segments = [Segment(p, name, 0, p.numel(), 0) for name, p in parameters.items()]
        self.owned = {s.name: (0, s.numel) for s in self.segments if owns}
        self._optimizer = detached_copy(optimizer)
        self._state = self._optimizer.state = state
        self._kernels = kernels_for(optimizer)  # what its class steps by, if state may be packed
        self._step = unhooked_step(optimizer)
        self.written: list[dict[str, Any]] = []  # as TorchUpdater's

    def step(self, owners: dict[int, int], groups: Sequence[Group], gradient_factor: float) -> None:
        mine = [s.parameter for s in self.segments if s.parameter.grad is not None and id(s.parameter) in owners]
        if mine and gradient_factor != 1.0:
            torch._foreach_mul_([p.grad for p in mine if p.grad is not None], gradient_factor)
        owned = [[p for p in mine if owners.get(id(p)) == index] for index in range(len(groups))]
        options = OwnOptions(groups, owned)
        self._optimizer.param_groups = options.groups
        self._step(self._optimizer)
        self.written = options.written()

    def zero_gradients(self) -> None:
        if gradients := [s.parameter.grad for s in self.segments if s.parameter.grad is not None]:
            torch._foreach_zero_(gradients)

    def read(self, index: int, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        segment = self.segments[index]
        entries = self._state.get(segment.parameter, {})
        if self._kernels is None:
            check_is_per_element(segment, entries)
        yield from elements(self._kernels, entries, start, stop)

    def put_numbers(self, index: int, numbers: dict[str, Any], group: Group) -> None:
        self._state[self.segments[index].parameter].update(copied(numbers))

    def write(self, index: int, key: str, start: int, values: torch.Tensor, group: Group) -> None:
        parameter = self.segments[index].parameter
        entries = self._state[parameter]
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
