"""A sharded model as DCP's Stateful: `state_dict` for saves and loads, `load_state_dict` after a load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from zeropg._native import _C
from zeropg.checkpoint.dcp.agreement import check_read_alike
from zeropg.checkpoint.dcp.own_copy import own_copy
from zeropg.checkpoint.dcp.shard_handle import Part, Range, ShardHandle, part_of
from zeropg.checkpoint.load_masters import Advance, load_masters, set_values
from zeropg.checkpoint.plan import ModelPlan, digest, plan_model
from zeropg.export.plan import has_extra_state
from zeropg.optim.update.segments import segments_of
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.state import ShardedState, state_of

SAVE, LOAD = "dcp_state_dict", "dcp.load"
_EXTRA = "_extra_state"  # torch's name for it


class ModelState:
    """What DCP saves and loads of a sharded model, under the names of its `state_dict`; `dcp_state_dict` makes it."""

    def __init__(self, model: nn.Module) -> None:
        self._state = state_of(model, SAVE)

    def state_dict(self) -> dict[str, Any]:
        """Returns a handle for each parameter (of its masters) and persistent buffer. All ranks must call."""
        state = self._state
        result: dict[str, Any] = {}

        def collect() -> str:
            state.check_modules(SAVE)
            state.check_outside_writable_shards(SAVE)
            plan = plan_model(state)
            result.update(_handles(state, plan))
            result.update(_extra_states(state.model))
            return digest(plan.described())

        announced = together(state.parallel.everybody, SAVE, collect)
        check_same(state.parallel.everybody, SAVE, [{"the model's tensors (digest)": text} for text in announced])
        state.settle_writes(SAVE)
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the model from what DCP has read into the handles of `state_dict`. All ranks must call.

        What DCP did not find keeps its value: `dcp.load` allows that with DefaultLoadPlanner(allow_partial_load=True).

        Raises ValueError, on every rank, where only a part of a tensor was found; the model is then as it was.
        """
        state = self._state
        loading: list[_Loading] = []

        def check() -> None:
            state.check_modules(LOAD)
            state.check_may_write(LOAD)
            state.check_has_own_weights(LOAD)
            loading.append(_Loading(state, plan_model(state), state_dict))

        together(state.parallel.everybody, LOAD, check)
        (opened,) = loading
        check_read_alike(state.parallel.everybody, LOAD, opened.names, opened.wanted, opened.read)
        load_masters(state, LOAD, opened.own_bytes, opened.set, opened.finish)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "[zeropg] what dcp_state_dict returns must stand at the top of the dictionary that dcp.save and dcp.load "
            "get, under keys of your choice; deeper inside call its state_dict() and load_state_dict() yourself"
        )


class _Loading:
    """What DCP has read for one model, checked. Raises TypeError or ValueError."""

    def __init__(self, state: ShardedState, plan: ModelPlan, state_dict: Mapping[str, Any]) -> None:
        self._state = state
        self._plan = plan
        self._extra = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] == _EXTRA}
        found: dict[int, list[Part]] = defaultdict(list)
        self.names = [tensor.name for tensor in plan.tensors]
        self.wanted: set[int] = set()
        for name, value in state_dict.items():
            if name in self._extra or name not in plan.index_of or plan.tensors[plan.index_of[name]].value.numel() == 0:
                continue
            part = part_of(name, value)
            part.check_whole()
            if part.is_wanted:
                self.wanted.add(plan.index_of[name])
            if part.is_read:
                found[plan.index_of[name]].append(part)
        self.read = set(found)
        self._parts = {index: _agreed(parts) for index, parts in found.items()}
        self.own_bytes = sum(part.nbytes for part in self._parts.values())

    def set(self, advance: Advance) -> None:
        set_values(self._state, self._plan, self._pieces, advance)
        modules = dict(self._state.model.named_modules())
        for name, value in self._extra.items():
            prefix = name[: -len(_EXTRA)].rstrip(".")
            if prefix in modules:
                modules[prefix].set_extra_state(value)

    def _pieces(self, index: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        if index in self._parts:
            yield start, self._parts[index].loaded(start, stop)
            self._parts[index].drop()

    def finish(self, _: Advance, failure: Exception | None) -> None:
        if failure is not None:
            raise failure


def _handles(state: ShardedState, plan: ModelPlan) -> dict[str, Any]:
    saved, loaded = _saved_parts(state), _loaded_ranges(state)
    result: dict[str, Any] = {}
    for name, index in plan.index_of.items():
        tensor = plan.tensors[index]
        shape, numel = tensor.value.shape, tensor.value.numel()
        if numel == 0:
            result[name] = torch.empty(shape, dtype=tensor.dtype)
            continue
        if tensor.is_sharded:
            saves, read = saved.get(tensor.name, ((0, 0), _no_values))
            saves = saves if tensor.is_saved_here else (0, 0)
            loads = loaded.get(tensor.name, (0, 0))
        else:  # every rank has it whole
            is_first = state.parallel.everybody.rank() == 0
            saves, read = (0, numel if is_first else 0), _reader_of(tensor.value)
            loads = (0, numel)
        part = Part(name, tensor.cut, tensor.dtype, saves=saves, loads=loads, read=read, state=state)
        result[name] = ShardHandle(part)
    return result


Reader = Callable[[int, int], torch.Tensor]


def _saved_parts(state: ShardedState) -> dict[str, tuple[Range, Reader]]:
    """Which masters this rank saves, by the first name of their parameter, and what reads them."""
    parts: dict[str, tuple[Range, Reader]] = {}
    for group in state.core.flat_groups:
        for name, first, start, stop in group.local_shards:
            parts[name] = (start, stop), _reader_of_masters(group, first - start)
    return parts


def _loaded_ranges(state: ShardedState) -> dict[str, Range]:
    """Which masters this rank updates, by the first name of their parameter."""
    groups: list[Any] = list(state.core.flat_groups)
    segments = [segment for group in groups for segment in segments_of(group)]
    return {segment.name: (segment.offset, segment.offset + segment.numel) for segment in segments}


def _reader_of_masters(group: _C.FlatGroup, first: int) -> Reader:
    return lambda start, stop: group.read_master(first + start, first + stop)


def _reader_of(value: torch.Tensor) -> Reader:
    return lambda start, stop: value.detach().reshape(-1)[start:stop]


def _no_values(start: int, stop: int) -> torch.Tensor:
    raise AssertionError(f"nothing here has elements {start} to {stop}")


def _extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules return beside tensors, under torch's names for it."""
    return {
        f"{prefix}.{_EXTRA}".lstrip("."): own_copy(module.get_extra_state(), f"the extra state of module '{prefix}'")
        for prefix, module in model.named_modules()
        if has_extra_state(module)
    }


def _agreed(parts: list[Part]) -> Part:
    """Returns the first of what was read under each name of one tensor. Raises ValueError where they differ."""
    first, *others = parts
    for other in others:
        if not first.has_same_values(other):
            raise ValueError(
                f"'{first.name}' and '{other.name}' are one tied tensor in the model, two with other values in the "
                "checkpoint"
            )
        other.drop()
    return first
