"""DeepSpeed's checkpoint into a sharded model and its optimizer: each rank reads the elements that it keeps."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropg.checkpoint.debts import load_debts
from zeropg.checkpoint.load_masters import Advance, load_masters, set_values
from zeropg.checkpoint.match import check_groups, match_tensors
from zeropg.checkpoint.plan import group_names, plan_model, refuse_parts
from zeropg.checkpoint.residuals import load_residuals
from zeropg.deepspeed.checkpoints.contents import Contents, SavedGroup, SavedState
from zeropg.deepspeed.checkpoints.read import read_contents
from zeropg.deepspeed.checkpoints.stored import same_values
from zeropg.deepspeed.ops.uncorrected_adam import UncorrectedAdam
from zeropg.optim.kernels import kernels_for
from zeropg.optim.saved_state import StateShard
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.state import ShardedState, state_of

_OPERATION = "load_checkpoint"
_WHICH = "the checkpoint's optimizer"
# Options that torch's optimizers may lack, and the value that makes no difference.
_NEUTRAL = {"bias_correction": True, "eps_inside_sqrt": False, "amsgrad": False, "maximize": False}


def load_deepspeed(
    folder: Path,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    *,
    strict: bool = True,
    reads_model: bool = True,
    check: Callable[[Contents], None] = lambda contents: None,
) -> Contents:
    """Sets model and optimizer from a tag's folder of DeepSpeed's, of any stage and world size. All ranks must call.

    Masters are the saved fp32 ones. What compression still owed is dropped: DeepSpeed has nothing of the kind.

    Args:
        optimizer: None: the saved state is not read.
        strict: False: tensors that are missing in the folder keep their values, and others there are ignored.
        reads_model: False: masters, parameters and buffers stay as they are.
        check: raises ValueError for what the caller cannot use, before anything is changed.

    Returns:
        What the folder holds beside that: counters, scheduler, loss scale, client state.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, its pickle asks for what is no data, files are of more than one checkpoint, or
            it is of another model or optimizer.
        OSError: a file cannot be read.
        Every rank raises the same error. Unless the message says otherwise, the model is as it was.
    """
    state = state_of(model, _OPERATION)
    group = state.core.process_group
    loading: _Loading | None = None

    def open_files() -> dict[str, str]:
        nonlocal loading
        state.check_may_write(_OPERATION)
        state.check_has_own_weights(_OPERATION)
        loading = _Loading(folder, state, optimizer, strict=strict, reads_model=reads_model)
        check(loading.contents)
        return loading.announcement()

    check_same(group, _OPERATION, together(group, _OPERATION, open_files))
    assert loading is not None  # otherwise the line above has raised
    opened: _Loading = loading
    if group.rank() == 0 and (differences := opened.differences()):
        warnings.warn(f"[zeropg] {_OPERATION}: {'; '.join(differences)}", stacklevel=4)
    load_masters(state, _OPERATION, opened.own_bytes(), opened.read_model, opened.read_optimizer)
    return opened.contents


class _Loading:
    """Reads the files' headers and compares them with the model. Nothing here communicates."""

    def __init__(
        self,
        folder: Path,
        state: ShardedState,
        optimizer: ShardedOptimizer | None,
        *,
        strict: bool,
        reads_model: bool,
    ) -> None:
        self._state = state
        self._optimizer = optimizer
        self._plan = plan_model(state)
        refuse_parts(
            self._plan,
            "DeepSpeed's checkpoints load into whole ones: load it into the model without tensor parallelism, call "
            "zeropg.save_checkpoint there, and load that",
        )
        self._reads_model = reads_model
        names = None if optimizer is None else group_names(optimizer, self._plan)
        self.contents = read_contents(folder, names, with_state=optimizer is not None)
        tensors = self.contents.tensors
        self._stored_names = match_tensors(
            tensors,
            self.contents.aliases,
            self._plan,
            strict=strict and reads_model,
            are_equal=lambda name, other: same_values(tensors[name], tensors[other]),
        )
        self._saved: SavedState | None = None
        self._groups: list[tuple[dict[str, Any], SavedGroup]] = []  # ours, and the saved one of the same parameters
        if optimizer is not None:
            self._saved = self.contents.optimizer
            if self._saved is None:
                raise ValueError(
                    f"'{folder}' holds no optimizer state; pass load_optimizer_states=False to load the model alone"
                )
            self._groups = self._match_groups(self._saved, optimizer)
            self._check_keys(self._saved, optimizer)

    def announcement(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        contents = self.contents
        stored = sorted((name, one.shape, str(one.dtype)) for name, one in contents.tensors.items())
        described = repr((stored, contents.stage, contents.world_size, contents.counters))
        return {
            "what the checkpoint holds (digest)": hashlib.sha256(described.encode()).hexdigest()[:16],
            "load_optimizer_states": str(self._saved is not None),
        }

    def differences(self) -> list[str]:
        """What makes steps from here on others than those of the job that saved, though all the state fits."""
        found = []
        options = [(here, theirs.options) for here, theirs in self._groups]
        ours = [self._class_of(here) for here, _ in options]
        saved = self.contents.optimizer_class
        is_decayed = any(theirs.get("weight_decay", 0) for _, theirs in options)
        for name in dict.fromkeys(ours) if saved is not None else ():
            is_adam = {name, saved} == {"Adam", "AdamW"}  # which differ in how weights decay
            if saved is not None and saved.lower() != name.lower() and (is_decayed or not is_adam):
                found.append(f"the checkpoint's configuration says optimizer {saved}, yours steps as {name}")
        for key, neutral in _NEUTRAL.items():
            if any(here.get(key, neutral) != theirs.get(key, neutral) for here, theirs in options if key in here):
                found.append(f"{_WHICH} has {key}={neutral}, yours has {not neutral}")
            elif any(not _has(here, key) and theirs.get(key, neutral) != neutral for here, theirs in options):
                found.append(f"{_WHICH} has {key}={not neutral}, which yours has not")
        return found

    def _class_of(self, group: dict[str, Any]) -> str:
        assert self._optimizer is not None
        kernels = kernels_for(self._optimizer._wrapped)
        if isinstance(self._optimizer._wrapped, UncorrectedAdam):
            return "AdamW" if group["adam_w_mode"] else "Adam"
        if kernels is None:
            return type(self._optimizer._wrapped).__name__
        return kernels.of(group).torch_classes[0].rpartition(".")[2]

    def own_bytes(self) -> int:
        """About how much this rank will read."""
        core = self._state.core
        tensors = [*self.contents.tensors.values()]
        for state in self._saved.tensors.values() if self._saved is not None else ():
            tensors += state.values()
        total = sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in tensors)
        return total // (core.shards if core.stage > 0 else 1)

    def read_model(self, advance: Advance) -> None:
        """Sets masters, parameters and buffers; between the core's begin_step and end_load."""
        set_values(self._state, self._plan, self._pieces, advance)
        load_residuals(self._state.core, [], former=1)  # what theirs have is of other ranges

    def read_optimizer(self, advance: Advance, failure: Exception | None) -> None:
        """Sets the optimizer's state and param groups. Raises `failure`, of read_model, if there is one."""
        try:
            if failure is not None:
                raise failure
            if self._saved is not None and self._optimizer is not None:
                self._read_optimizer(self._saved, self._optimizer, advance)
        except (ValueError, OSError) as error:
            text = f"{error}; the model holds old and new values now: load a checkpoint before you use it"
            raise (ValueError if isinstance(error, ValueError) else OSError)(text) from error

    def _read_optimizer(self, saved: SavedState, optimizer: ShardedOptimizer, advance: Advance) -> None:
        for here, group in self._groups:
            # DeepSpeed's own optimizers have options that torch's have not, and ours say which rule they are.
            known = {*here, "initial_lr"} - {"bias_correction", "adam_w_mode"}
            here.update({key: value for key, value in group.options.items() if key in known})
        optimizer.load_local_state(self._state_shards(saved, optimizer, advance), self._numbers(saved, optimizer))
        load_debts(optimizer, [], self._state.core.world_size)

    def _match_groups(self, saved: SavedState, optimizer: ShardedOptimizer) -> list[tuple[dict[str, Any], SavedGroup]]:
        """Pairs the param groups that hold something; DeepSpeed drops parameters that are not trained from its own."""
        held = {self.contents.aliases.get(name, name) for group in saved.groups for name in group.names}
        here = []
        for group, names in zip(optimizer.param_groups, group_names(optimizer, self._plan), strict=True):
            own = map(self._saved_name, names)
            if trained := [name for name in own if name in held or name not in self.contents.frozen]:
                here.append((group, trained))
        there = [group for group in saved.groups if group.names]
        saved_names = [[self.contents.aliases.get(name, name) for name in group.names] for group in there]
        check_groups(_WHICH, saved_names, [names for _, names in here])
        return [(group, theirs) for (group, _), theirs in zip(here, there, strict=True)]

    def _check_keys(self, saved: SavedState, optimizer: ShardedOptimizer) -> None:
        """Raises ValueError where the saved state is another optimizer's, before anything is changed."""
        kernels = kernels_for(optimizer._wrapped)
        if kernels is None:
            return  # torch's own class takes what it is given
        for group, theirs in self._groups:
            kernel = kernels.of(group)
            expected = {slot.name for slot in kernel.optimizer.state_slots(kernel.hyperparameters(group))}
            for name in theirs.names:
                keys = saved.tensors.get(name, {}).keys()
                if keys and keys != expected:
                    raise ValueError(
                        f"{_WHICH} keeps {sorted(keys)} of '{name}', yours ({kernel.name}) keeps {sorted(expected)}; "
                        "make one of the class and options that were saved, or pass load_optimizer_states=False"
                    )
                if keys and kernel.counts_steps and "step" not in saved.numbers.get(name, {}):
                    raise ValueError(
                        f"{_WHICH} does not say how many steps '{name}' has had: convert the checkpoint again, or pass "
                        "load_optimizer_states=False"
                    )

    def _saved_name(self, name: str) -> str:
        return self._stored_names.get(self._plan.index_of[name], name)

    def _pieces(self, index: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        name = self._stored_names.get(index) if self._reads_model else None
        return iter(()) if name is None else self.contents.tensors[name].pieces(start, stop)

    def _kept(self, optimizer: ShardedOptimizer) -> Iterator[tuple[str, str, int, int]]:
        """Yields (parameter name, its name in the checkpoint, start, stop) of what this rank keeps state for."""
        for name, (start, stop) in optimizer.local_ranges().items():
            yield name, self._saved_name(name), start, stop

    def _state_shards(self, saved: SavedState, optimizer: ShardedOptimizer, advance: Advance) -> Iterator[StateShard]:
        for name, saved_name, start, stop in self._kept(optimizer):
            for key, stored in saved.tensors.get(saved_name, {}).items():
                for at, values in stored.pieces(start, stop):
                    yield StateShard(name, key, values, at, at + values.numel())
                    advance(values.nbytes)

    def _numbers(self, saved: SavedState, optimizer: ShardedOptimizer) -> Iterator[tuple[str, str, Any]]:
        for name, saved_name, _, _ in self._kept(optimizer):
            for key, value in saved.numbers.get(saved_name, {}).items():
                is_step = key == "step" and not isinstance(value, torch.Tensor)  # DeepSpeed's own count in ints
                yield name, key, torch.tensor(float(value)) if is_step else value


def _has(group: dict[str, Any], key: str) -> bool:
    """Whether a param group of ours steps as an option of theirs says. LAMB says it in words of its own."""
    return key in group or (key == "bias_correction" and group.get("correction", "") is None)
