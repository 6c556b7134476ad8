"""A sharded optimizer as DCP's Stateful, in the layout of torch's get_optimizer_state_dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from zeropg.checkpoint.dcp.agreement import check_read_alike
from zeropg.checkpoint.dcp.own_copy import own_copy
from zeropg.checkpoint.dcp.shard_handle import Part, ShardHandle, part_of
from zeropg.checkpoint.match import check_groups
from zeropg.checkpoint.optimizers import own_words
from zeropg.checkpoint.plan import ModelPlan, digest, group_names, plan_model
from zeropg.optim.kept_state import KeptState
from zeropg.optim.kernels import STORAGE_OPTIONS
from zeropg.optim.saved_state import StateShard
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.optim.update.entries import is_per_element
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.state import ShardedState, unchecked_state_of
from zeropg.tensor_parallel.pieces import whole

SAVE, LOAD = "dcp_state_dict", "dcp.load"
# How a program runs its steps, not what they compute: these stay as the program has set them.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", *STORAGE_OPTIONS)
_NOT_OPTIONS = ("params", "param_names")


class OptimizerState:
    """What DCP saves and loads of a sharded optimizer; `dcp_state_dict` makes it.

    {"state": {parameter name: {key: value}}, "param_groups": [{"params": [names], "lr": ...}]}. A parameter without
    state, as before its first step, is saved with zeros and a step of 0, where that means the same.
    """

    def __init__(self, optimizer: ShardedOptimizer, name: str) -> None:
        """name: among several of one model."""
        self._optimizer = optimizer
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        """Returns handles for this rank's part of the state, and copies of the param groups. All ranks must call."""
        optimizer = self._optimizer
        state = unchecked_state_of(optimizer._model, SAVE)
        result: dict[str, Any] = {"state": {}}

        def collect() -> str:
            state.check_modules(SAVE)
            plan = plan_model(state)
            for kept in optimizer.kept_states():
                if entries := _entries(kept, plan, state):
                    result["state"][plan.tensors[plan.index_of[kept.name]].name] = entries
            result["param_groups"] = self._groups(plan)
            return digest([sorted(group) + group["params"] for group in result["param_groups"]])

        announced = together(state.parallel.everybody, SAVE, collect)
        key = f"the optimizer{own_words(self._name)}'s param_groups (digest)"
        check_same(state.parallel.everybody, SAVE, [{key: text} for text in announced])
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets state and param groups from what DCP has read into `state_dict`. All ranks must call.

        foreach, fused, capturable, differentiable and state_bits stay as they are. Parameters of which DCP found no
        state, which DefaultLoadPlanner(allow_partial_load=True) allows, have none afterwards, as before their first
        step; but some state must be there.

        Raises ValueError, on every rank, for the state of another optimizer; this one is then as it was.
        """
        state = unchecked_state_of(self._optimizer._model, LOAD)
        loading: list[_Loading] = []

        def check() -> None:
            state.check_modules(LOAD)
            loading.append(_Loading(self._optimizer, self._name, plan_model(state), state_dict))

        try:
            together(state.parallel.everybody, LOAD, check)
            (opened,) = loading
            check_read_alike(state.parallel.everybody, LOAD, opened.names, opened.wanted, opened.read)
        except ValueError as error:
            raise ValueError(
                f"{error}; what stands before the optimizer in the dictionary, such as the model, is loaded already"
            ) from error
        together(state.parallel.everybody, LOAD, opened.set)

    def _groups(self, plan: ModelPlan) -> list[dict[str, Any]]:
        groups = []
        for index, (group, names) in enumerate(
            zip(self._optimizer.param_groups, group_names(self._optimizer, plan), strict=True)
        ):
            options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            groups.append({"params": names, **own_copy(options, f"param_groups[{index}]")})
        return groups

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "[zeropg] what dcp_state_dict returns must stand at the top of the dictionary that dcp.save and dcp.load "
            "get, under keys of your choice; deeper inside call its state_dict() and load_state_dict() yourself"
        )


class _Loading:
    """What DCP has read for one optimizer, checked. Raises TypeError or ValueError; sets nothing before `set`."""

    def __init__(self, optimizer: ShardedOptimizer, name: str, plan: ModelPlan, state_dict: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        which = f"the checkpoint's optimizer{own_words(name)}"
        self._options = _options(which, optimizer, plan, state_dict["param_groups"])
        self._found: list[_Found] = []
        self.names = [tensor.name for tensor in plan.tensors]
        self.wanted: set[int] = set()
        self.read: set[int] = set()
        groups = [{**group, **options} for group, options in zip(optimizer.param_groups, self._options, strict=True)]
        for kept in optimizer.kept_states(groups):
            index = plan.index_of[kept.name]
            found = _find(which, kept, state_dict["state"].get(plan.tensors[index].name, {}))
            if kept.first.entries:
                self.wanted.add(index)
            if found is not None:
                self.read.add(index)
                self._found.append(found)

    def set(self) -> None:
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                if isinstance(group[key], torch.Tensor):  # schedulers hold it
                    group[key].copy_(value)
                else:
                    group[key] = value
        found = [each for each in self._found if not each.is_none]
        numbers = [(each.name, key, value) for each in found for key, value in each.numbers.items()]
        self._optimizer.load_local_state(_shards(found), numbers)


class _Found(NamedTuple):
    """The state of one parameter as it was read."""

    name: str
    parts: dict[str, Part]
    numbers: dict[str, Any]
    kept: tuple[int, int]
    is_none: bool  # of a parameter that was never stepped


def _find(which: str, kept: KeptState, entries: Mapping[str, Any]) -> _Found | None:
    """Returns what was read of one parameter's state, None where there was none."""
    if entries.keys() != kept.first.entries.keys():
        raise ValueError(
            f"{which} keeps {sorted(kept.first.entries)} for '{kept.name}' with the options of its param group, yours "
            f"{sorted(entries)}; make the optimizer with the options that it was saved with"
        )
    parts: dict[str, Part] = {}
    numbers: dict[str, Any] = {}
    missing = []
    for key, value in entries.items():
        if not isinstance(value, ShardHandle):  # read as it is
            numbers[key] = value
            continue
        part = part_of(f"{kept.name}/{key}", value)
        part.check_whole()
        if not part.is_read:
            missing.append(key)
        elif is_per_element(key, kept.first.entries[key]):
            parts[key] = part
        else:
            numbers[key] = part.loaded(0, 1).view(part.shape).clone()
    if missing and parts:
        raise ValueError(f"{which} has {sorted(parts)} for '{kept.name}', but not {missing}")
    if missing or not entries:
        return None
    is_none = kept.first.begins_with_zeros and "step" in numbers and float(numbers["step"]) == 0
    return _Found(kept.name, parts, numbers, kept.kept, is_none)


def _shards(found: list[_Found]) -> Iterator[StateShard]:
    for each in found:
        start, stop = each.kept
        for key, part in each.parts.items():
            yield StateShard(each.name, key, part.loaded(start, stop), start, stop)
            part.drop()


def _options(
    which: str, optimizer: ShardedOptimizer, plan: ModelPlan, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the options to set, by param group. Raises ValueError where groups hold other parameters."""
    names = [
        [plan.tensors[plan.index_of[n]].name if n in plan.index_of else str(n) for n in g["params"]] for g in saved
    ]
    check_groups(which, names, group_names(optimizer, plan))
    return [
        {key: value for key, value in group.items() if key not in (*_NOT_OPTIONS, *_IMPLEMENTATION)} for group in saved
    ]


def _entries(kept: KeptState, plan: ModelPlan, state: ShardedState) -> dict[str, Any]:
    """Handles for one parameter's state: what is there, or what its first step would leave."""
    if unknown := (kept.dtypes.keys() | kept.numbers.keys()) - kept.first.entries.keys():
        raise ValueError(
            f"the optimizer's state of '{kept.name}' has {sorted(unknown)}, which a first step with the options of its "
            "param group does not make, so that a load would not ask for it; use zeropg.save_checkpoint"
        )
    tensor = plan.tensors[plan.index_of[kept.name]]
    has_state = bool(kept.dtypes or kept.numbers)
    saves = kept.owned if tensor.is_saved_here and (has_state or kept.first.begins_with_zeros) else (0, 0)
    entries: dict[str, Any] = {}
    for key, first in kept.first.entries.items():
        path = f"{kept.name}/{key}"
        if is_per_element(key, first):
            dtype = kept.dtypes.get(key, first.dtype)
            read = _reader(kept, key) if key in kept.dtypes else _zeros(dtype)
            entries[key] = ShardHandle(
                Part(path, tensor.cut, dtype, saves=saves, loads=kept.kept, read=read, state=state)
            )
        elif isinstance(value := kept.numbers.get(key, first if has_state else _zero(first)), torch.Tensor):
            bounds = (0, 1 if saves[0] < saves[1] else 0)
            read = _number(value.detach().clone())
            part = Part(path, whole(value.shape), value.dtype, saves=bounds, loads=(0, 1), read=read, state=state)
            entries[key] = ShardHandle(part)
        else:
            entries[key] = value
    return entries


Read = Callable[[int, int], torch.Tensor]


def _reader(kept: KeptState, key: str) -> Read:
    return lambda start, stop: kept.read(key, start, stop)


def _zeros(dtype: torch.dtype) -> Read:
    return lambda start, stop: torch.zeros(stop - start, dtype=dtype)


def _number(value: torch.Tensor) -> Read:
    return lambda start, stop: value.reshape(-1)[start:stop]


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()
