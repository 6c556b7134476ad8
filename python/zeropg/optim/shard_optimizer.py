"""Optimizers over sharded models: `shard_optimizer`."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zeropg.optim.accepted import check_group, kernels_of
from zeropg.optim.checked_groups import CheckedOptimizer, digest_of_options
from zeropg.optim.kept_state import KeptState, kept_states
from zeropg.optim.kernels import FUSED, STORAGE_OPTIONS, Group
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.normal_tensors import normal_tensors
from zeropg.optim.saved_state import (
    Factor,
    StateShard,
    put_shards,
    state_factors,
    state_keys,
    state_numbers,
    state_shards,
)
from zeropg.optim.update.division import Division, owners_of
from zeropg.optim.update.layerwise import rule_of
from zeropg.optim.update.momentum import MomentumUpdater, make_exchange
from zeropg.optim.update.offloaded import OffloadedStep, OffloadedUpdater
from zeropg.optim.update.updater import Move, put_entries
from zeropg.optim.update.views import TorchUpdater
from zeropg.optim.update.whole import WholeUpdater
from zeropg.rank_io.agreement import together
from zeropg.sharding.offload import human_bytes
from zeropg.sharding.running_statistics import broadcast_running_statistics
from zeropg.sharding.state import ShardedState


def shard_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, overlap_step: bool | None = None
) -> torch.optim.Optimizer:
    """Makes an optimizer that steps only what this rank owns of a model that `fully_shard` has sharded.

    Adagrad, Adam, AdamW, SGD and zeropg.optim's Adam, AdamW and Lion on the CPU run on zeropg's fused kernels (the
    result differs from torch's by rounding only). The other elementwise classes of torch.optim run unchanged over flat
    views. So does a class of your own that says `zeropg_elementwise = True`: it promises that an element's update
    depends on the element's own parameter, gradient and state alone, and that state is tensors of the parameter's
    shape, Python numbers, and a tensor called "step". Layer-wise optimizers (Adafactor, LAMB and Muon of
    zeropg.optim, torch.optim's Adafactor and Muon) communicate in a step; their docstrings say how much.

    The returned optimizer shares the param_groups dictionaries, hooks and state of `optimizer`, so learning-rate
    schedulers that were made before still act; `optimizer.step()` itself raises from then on. State that `optimizer`
    already holds is cut into the ranks' shards.

    With a model that has `offload_optimizer` all ranks must call, since they reserve room together; otherwise it does
    not communicate. All ranks must call `step()` of the result.

    Args:
        optimizer: made over parameters of `model`, before or after `fully_shard`.
        model: what `zeropg.fully_shard` returned.
        overlap_step: whether `step()` of stages 1 and 2 returns before the other ranks' new weights are here. They come
            behind the next forward, in which each unit waits for its own: True. Every call of zeropg that reads or
            writes weights, state_dict of the model, and the next backward wait for all; a parameter that a program
            reads or writes before its unit is there raises RuntimeError, and is never stale. What goes wrong on the way
            is raised by whatever waits. Values are the same to the bit. With weights= of a compression plan it takes 4
            bytes per parameter. None, False: `step()` waits. In stage 0 nothing is sent and in stage 3 forwards fetch
            what they need, so that it changes nothing there.

    Raises:
        TypeError: `model` is not sharded, or `optimizer` is none or sharded already, or has fewer `state_bits` than 32
          and masters in float64.
        ValueError: the optimizer holds a parameter that is not the model's.
        NotImplementedError: the class, or `capturable` or `differentiable`, cannot work on shards.
        OSError: on every rank, where one has no room for the state in its offload directory.
    """
    if overlap_step not in (None, False, True):
        raise TypeError(f"[zeropg] shard_optimizer: overlap_step is {overlap_step!r}, expected None, False or True")
    return ShardedOptimizer(optimizer, model, overlaps=bool(overlap_step))


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose `step` updates this rank's flat ranges; made by `shard_optimizer`.

    `state[parameter]` has torch's keys; its tensors are 1-D, the part of the parameter that this rank owns. With state
    in a file it holds the numbers only; `state_dict` and `local_state` read the tensors.
    """

    _is_made = False

    @normal_tensors()
    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, overlaps: bool = False):
        self._overlaps = overlaps
        # What the next step multiplies the gradients by, once: zeropg.GradScaler sets it.
        self.gradient_factor = 1.0
        self._core = _core_of(model)
        _check_is_not_sharded(optimizer)
        self._kernels = kernels_of(optimizer)
        _check_has_its_own_step(optimizer)
        self._rule = rule_of(optimizer)
        self._model_state: ShardedState | None = getattr(model, "_zeropg_state", None)
        self._wrapped = optimizer
        self._model = model
        offload = self._core.optimizer_offload
        if offload is not None and (self._kernels is None or self._rule is not None):
            raise NotImplementedError(
                f"[zeropg] shard_optimizer: {type(optimizer).__name__} keeps its state in memory, and the model has "
                f"offload_optimizer; use {', '.join(FUSED)}, or fully_shard without it"
            )
        self._momentum = optimizer if isinstance(optimizer, MomentumOptimizer) else None
        if self._momentum is not None:
            self._momentum.exchange = make_exchange(self._momentum, self._core, model)
        self._offloaded = None if offload is None else OffloadedStep(offload)
        self._failure = ""  # of a step that stopped half-way
        # Whether a step or a load was there: alike on all ranks, also on one that owns no element and keeps no state.
        self._has_state = any(optimizer.state.values())
        # Ids of the parameters that all ranks have; others are this rank's own.
        self._sharded = {id(p) for flat in self._core.flat_groups for _, p, _, _ in flat.slots}
        self._written: set[str] = set()  # options that steps of its class have put into param groups
        self._served: dict[int, dict[str, float]] = {}  # by param group: options that its kernel takes
        for group in optimizer.param_groups:
            check_group(optimizer, group, model)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._known_state = self.state  # what the updaters have
        whole_state = {p: self._unpacked(p, entries) for p, entries in optimizer.state.items() if entries}
        self._share_with(optimizer)
        self._division = Division(self._core, model, optimizer, self.state, self._kernels, self._offloaded)
        self._division.add_missing(self.param_groups)
        self._is_made = True
        self._reserve()
        self._put(whole_state)
        self._warn_of_parameters_without_group()
        self._follow_phase()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates parameters from their gradients; all ranks must call it.

        Args:
            closure: re-evaluates the model, once, before the update; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._model_state is not None:
            self._model_state.check_may_write("step")
            self._model_state.check_outside_full_gradients("step")
            self._model_state.check_has_own_weights("step")
        groups = [
            {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in self.param_groups
        ]
        self._follow_groups(groups)
        self._take_over_edits()
        if self._failure:
            raise RuntimeError(
                f"[zeropg] step: an earlier step stopped half-way, so masters and state do not fit each other "
                f"({self._failure}); make model and optimizer anew and load a checkpoint"
            )
        if self._model_state is not None:
            self._model_state.begin_step()
        self._begin_step(groups)
        try:
            if self._offloaded is None:
                self._update(groups)
            else:  # a disk that fails on one rank ends the step on all
                together(self._everybody, "step", lambda: self._update(groups))
        except Exception as error:
            if self._offloaded is not None:  # other ranks, or other chunks, may have stepped
                self._failure = str(error)
            raise
        finally:
            self.gradient_factor = 1.0
            self._has_state = True
            self._end_step()  # also after an error: the other ranks are waiting in theirs
        self._follow_phase()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # what schedulers made before ask
        return loss

    @property
    def _everybody(self) -> dist.ProcessGroup:
        """The ranks that step together."""
        state = self._model_state
        return self._core.process_group if state is None else state.parallel.everybody

    def _begin_step(self, groups: Sequence[Group]) -> None:
        clipped = None if self._model_state is None else self._model_state.clipped
        what_else = (self.gradient_factor, clipped)
        try:
            options = digest_of_options(self._wrapped, groups, self._sharded, what_else, self._written)
            self._core.begin_step(options)
        except RuntimeError as error:
            if clipped is None or "param groups of other numbers" not in str(error):
                raise
            max_norm, norm_type, error_if_nonfinite = clipped
            raise RuntimeError(
                f"{error} So do the arguments of clip_grad_norm_ count: on this rank max_norm {max_norm}, norm_type "
                f"{norm_type}, error_if_nonfinite {bool(error_if_nonfinite)}."
            ) from error

    def _end_step(self) -> None:
        """Hands out what rank 0's batch norms have counted, and the new weights, whatever happens in between."""
        try:
            if self._model_state is not None:  # before weights are on their way, behind which it would wait
                broadcast_running_statistics(self._model_state.with_statistics, self._core.process_group)
        finally:
            self._core.end_step(self._overlaps)

    def move_state(self, move: Move) -> None:
        """Replaces the memory of the state per element by what `move` returns for it, tensor by tensor.

        Steps need it where the masters are. What is in a tier stays there. Does not communicate.
        """
        for updater in self._division.updaters:
            updater.move_state(move)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or fills them with zeros in place if `set_to_none` is False."""
        if set_to_none:
            super().zero_grad(set_to_none=True)
        else:
            if self._model_state is not None:
                self._model_state.check_outside_full_gradients("zero_grad(set_to_none=False)")
            if self._holds_all_gradients():
                self._core.zero_gradients()
            else:
                self._zero_own_gradients()
            for updater in self._division.updaters:
                if isinstance(updater, WholeUpdater):
                    updater.zero_gradients()

    def own_parameters(self) -> list[torch.Tensor]:
        """Those in its param_groups: other optimizers may have the model's other ones."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _holds_all_gradients(self) -> bool:
        own = set(map(id, self.own_parameters()))
        slots = (slot for group in self._core.flat_groups for slot in group.slots)
        return all(id(parameter) in own for _, parameter, _, _ in slots if parameter.requires_grad)

    def _zero_own_gradients(self) -> None:
        """Other optimizers have gradients in the same buffers. The next backward takes these over."""
        for parameter in self.own_parameters():
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad.dtype)

    def add_param_group(self, param_group: Group) -> None:
        """Adds parameters of the sharded model that no group holds yet; all ranks must do so alike."""
        if self._is_made and self._momentum is not None:
            self._momentum.refuse_more_parameters()
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"]
            param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
            check_group(self._wrapped, param_group, self._model)
        super().add_param_group(param_group)
        try:
            self._check_added(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise
        if self._is_made:
            self._division.add_missing(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's layout with this rank's shards; only the same rank of the same world size can load it.

        Does not communicate. `zeropg.save_checkpoint` writes what any world size loads.
        """
        self._core.join_step()
        state_dict = super().state_dict()
        self._add_elements(state_dict["state"])
        state_dict["zeropg"] = {
            "rank": self._core.rank,
            "world_size": self._core.world_size,
            "ranges": self.local_ranges(),
        }
        if self._momentum is not None and self._momentum.exchange is not None:
            state_dict["zeropg"]["debts"] = self._momentum.exchange.state.state_dict()
        return state_dict

    @normal_tensors()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned on this rank, or the whole state_dict of a plain torch optimizer.

        Raises:
            ValueError: it comes from another rank or world size, or from other param_groups.
        """
        self._core.join_step()
        loaded: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        origin = loaded.get("zeropg")
        if origin is not None and "ranges" in origin:  # else of a whole OneBitAdam
            self._check_origin(origin)
        saved_groups = loaded["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"[zeropg] load_state_dict: param groups of sizes {[len(g['params']) for g in saved_groups]}, expected "
                f"{[len(g['params']) for g in self.param_groups]}; make the optimizer with the groups it was saved with"
            )
        by_id: dict[Any, torch.Tensor] = {}
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            by_id.update(zip(saved["params"], group["params"], strict=True))
            options = {key: value for key, value in saved.items() if key not in ("params", *STORAGE_OPTIONS)}
            group.update(copy.deepcopy(options))
        self._division.divide_anew(self.param_groups)
        self._has_state = bool(loaded["state"]) or self._has_state
        self._put({by_id[k]: s for k, s in loaded["state"].items() if k in by_id})
        if self._momentum is not None:
            self._momentum.load_debts(origin or {})
        self._follow_phase()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def local_ranges(self) -> dict[str, tuple[int, int]]:
        """Returns, by parameter name, which elements of the flattened parameter this rank keeps state for.

        Of a DTensor those of this rank's part, `to_local()`.
        """
        return {s.name: (s.offset, s.offset + s.numel) for updater in self._division.updaters for s in updater.segments}

    def local_state(self) -> Iterator[StateShard]:
        """Yields the state that this rank saves, in pieces: over all ranks each element once, in every stage.

        The pieces of one (name, key) come in order. Each tensor is valid until the next is asked for, and only read:
        it is a live view, or a buffer that the next piece overwrites. Does not communicate.
        """
        return state_shards(self._division.updaters)

    def kept_states(self, groups: Sequence[Group] | None = None) -> Iterator[KeptState]:
        """Yields the state that this rank keeps, parameter by parameter, also of those that were never stepped.

        groups: whose options count for what a step keeps, in place of `param_groups`. Does not communicate.

        Raises NotImplementedError for an optimizer whose ranks owe each other something.
        """
        groups = self.param_groups if groups is None else groups
        return kept_states(self._division.places(groups), self.state)

    def local_keys(self) -> Iterator[tuple[str, str, torch.dtype]]:
        """Yields (parameter name, key, dtype) of what `local_state` yields, without reading it."""
        return state_keys(self._division.updaters)

    def local_scalars(self) -> Iterator[tuple[str, str, Any]]:
        """Yields (parameter name, key, value) of state that is one number per parameter, such as `step`.

        Of each parameter that this rank saves elements of.
        """
        return state_numbers(self._division.updaters, self.state)

    def local_factors(self) -> Iterator[Factor]:
        """Yields the state that is a tensor of another shape than the parameter's: see `FACTORS`.

        Of each parameter that this rank saves elements of. The tensors are live, and only read.
        """
        return state_factors(self._division.updaters, self.state)

    @normal_tensors()
    def load_local_state(self, shards: Iterable[StateShard], scalars: Iterable[tuple[str, str, Any]] = ()) -> None:
        """Replaces all state: the inverse of `local_state`, `local_scalars` and `local_factors`. Does not communicate.

        Args:
            shards: pieces in any order and cut that cover this rank's `local_ranges` once for every key; what lies
                outside of them is ignored. Copied before the next piece is asked for.
            scalars: as in `local_scalars`; and factors, as (parameter name, key, whole tensor).

        Raises:
            ValueError: a key that this optimizer does not keep, a tensor whose length is not stop - start, or pieces
                that leave elements out. All state is then as before the first step.
        """
        self._clear()
        self._division.divide_anew(self.param_groups)
        self._has_state = True
        try:
            put_shards(self._division.places(self.param_groups), shards, scalars)
        except BaseException:
            self._clear()
            raise
        self._follow_phase()

    def own_state(self) -> dict[str, Any]:
        """What is this rank's alone and no part of `local_state`: what it owes, and momenta that ranks do not share."""
        if self._momentum is None or self._momentum.exchange is None:
            return {}
        own: dict[str, dict[str, torch.Tensor]] = {}
        for updater, index, _ in self._division.places(self.param_groups):
            segment = updater.segments[index]
            entries = self.state.get(segment.parameter, {})
            if mine := {key: entries[key] for key in self._momentum.own_state if key in entries}:
                own[segment.name] = mine
        return {"debts": self._momentum.exchange.state.state_dict(), "state": own}

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `own_state` gave on this rank; {}: this rank owes nothing, such momenta begin anew."""
        if self._momentum is None:
            return
        self._momentum.load_debts({"rank": self._core.rank, "debts": saved["debts"]} if saved else {})
        for updater, index, group in self._division.places(self.param_groups):
            for key, value in saved.get("state", {}).get(updater.segments[index].name, {}).items():
                updater.write(index, key, 0, value.reshape(-1), group)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        raise NotImplementedError(
            "[zeropg] torch.amp.GradScaler cannot see an infinite gradient of another rank; use zeropg.GradScaler"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "[zeropg] a sharded optimizer cannot be copied or pickled; use state_dict or zeropg.save_checkpoint"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()

    def _unpacked(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        """State that the wrapped optimizer has already, with a value per element where its class packs it."""
        unpack: Callable[..., dict[str, Any]] = getattr(self._wrapped, "unpacked", lambda _, entries: dict(entries))
        return unpack(parameter, entries)

    def _follow_phase(self) -> None:
        """Tells the model whether its next backward averages gradients."""
        if self._momentum is not None:
            self._core.averages_gradients = self._momentum.averages_gradients()

    def _update(self, groups: Sequence[Group]) -> None:
        owners = owners_of(self.param_groups)
        if self._offloaded is not None:
            self._offloaded.clear()
        for updater in self._division.updaters:
            updater.step(owners, groups, self.gradient_factor)
        if self._offloaded is not None:
            self._offloaded.run()
        self._take_over_options()

    def _take_over_options(self) -> None:
        """What a class of the program's own has put into its param groups: each updater has begun with the same."""
        for updater in self._division.updaters:
            if isinstance(updater, TorchUpdater | WholeUpdater):
                for group, written in zip(self.param_groups, updater.written, strict=False):
                    group.update(written)
                    self._written.update(written)

    def _reserve(self) -> None:
        """Makes room in the tier, so that a full disk shows before the first step. Collective with offload."""
        if self._offloaded is None:
            return
        owners = owners_of(self.param_groups)
        missing = [
            (updater, slots)
            for updater in self._division.updaters
            if isinstance(updater, OffloadedUpdater) and (slots := updater.missing_slots(owners, self.param_groups))
        ]
        if self._everybody.rank() == 0:
            count = human_bytes(sum(updater.bytes_of(slot) for updater, slots in missing for slot in slots))
            where = self._offloaded.offload.describe()
            print(f"[zeropg] shard_optimizer: {count} of optimizer state per rank, to {where}", file=sys.stderr)

        def reserve() -> None:
            for updater, slots in missing:
                updater.reserve(slots)

        together(self._everybody, "shard_optimizer", reserve)

    def _add_elements(self, state: dict[int, Any]) -> None:
        """Adds copies of what is in the tier to a state_dict's state, and puts them in place of what is packed."""
        packed = {} if self._kernels is None else self._kernels.packed_slots
        numbers = {id(p): number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for updater, index, _ in self._division.places(self.param_groups):
            segment = updater.segments[index]
            if segment.parameter not in self.state:
                continue
            shown = self.state[segment.parameter]
            entries = {k: v for k, v in shown.items() if k not in packed or v.dtype != torch.uint8}
            if not isinstance(updater, OffloadedUpdater) and len(entries) == len(shown):
                continue
            for key, start, values in updater.read(index, 0, segment.numel):
                if key not in entries:
                    entries[key] = values.new_empty(segment.numel)
                elif entries[key] is shown.get(key):
                    continue
                entries[key][start : start + values.numel()] = values
            state[numbers[id(segment.parameter)]] = entries

    def _follow_groups(self, groups: Sequence[Group]) -> None:
        """Takes note of what the program has done to param groups since the last step. Nothing is stepped yet.

        groups: as `param_groups`, with numbers for tensors of one.
        """
        owners_of(groups)
        self._division.check_frozen()
        self._check_options(groups)
        has_more = not self._division.holds_all(self.param_groups)
        if has_more:
            if self._momentum is not None:
                self._momentum.refuse_more_parameters()
            for group in self.param_groups:
                check_group(self._wrapped, group, self._model)
        if differing := self._division.divided_otherwise(self.param_groups):
            if self._has_state:
                option = "use_muon" if self._rule else " or ".join(STORAGE_OPTIONS)
                raise RuntimeError(_changed(differing[0], option))
            self._division.divide_anew(self.param_groups)
        if (has_more or self._division.has_unfrozen()) and self._division.add_missing(self.param_groups):
            self._reserve()

    def _check_options(self, groups: Sequence[Group]) -> None:
        """Raises ValueError for options that no step takes, before some parameters have moved and others not."""
        if self._momentum is not None:
            self._momentum.gradients_are_local = not self._core.averages_gradients
        if isinstance(self._wrapped, CheckedOptimizer):
            self._wrapped.check_before_step(groups)
        for index, group in enumerate(groups):
            self._check_kernel(index, group)

    def _check_kernel(self, index: int, group: Group) -> None:
        rule = self._rule
        is_whole = rule is not None and all(rule.takes(parameter, group) for parameter in group["params"])
        if self._kernels is None or is_whole or not group["params"]:
            return
        kernel = self._kernels.of(group)
        options = kernel.hyperparameters(group)
        if self._served.get(index) != options:
            kernel.check(options)
            self._served[index] = options

    def _check_added(self, group: Group) -> None:
        if isinstance(self._wrapped, CheckedOptimizer):
            self._wrapped.check_group(group)
        self._check_kernel(len(self.param_groups) - 1, group)

    def _clear(self) -> None:
        self.state.clear()
        for updater in self._division.updaters:
            updater.clear()

    def _take_over_edits(self) -> None:
        if self.state is not self._known_state:  # `optimizer.state = ...`
            edited = dict(self.state)
            self._known_state.clear()
            self._known_state.update(edited)
            self.state = self._wrapped.state = self._known_state
        owners = owners_of(self.param_groups)
        for updater in self._division.updaters:
            updater.take_over_edits(owners, self.param_groups)

    def _put(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self._clear()
        by_id = {id(parameter): entries for parameter, entries in states.items()}
        for updater, index, group in self._division.places(self.param_groups):
            entries = by_id.get(id(updater.segments[index].parameter), {})
            if isinstance(updater, MomentumUpdater):
                updater.put(index, entries, group)
            else:
                put_entries(updater, index, entries, group)

    def _share_with(self, optimizer: torch.optim.Optimizer) -> None:
        for name in vars(optimizer):
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(self, name, getattr(optimizer, name))
        self.param_groups = optimizer.param_groups
        optimizer.state = self.state

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise RuntimeError(
                "[zeropg] this optimizer was given to shard_optimizer and knows no shards; use the one it returned"
            )

        refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers warn of an overridden step
        optimizer.step = refuse  # type: ignore[method-assign]
        optimizer.load_state_dict = refuse  # type: ignore[method-assign]
        optimizer.add_param_group = refuse  # type: ignore[method-assign]

    def _warn_of_parameters_without_group(self) -> None:
        owners = owners_of(self.param_groups)
        missing = [n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in owners]
        if missing:
            warnings.warn(
                f"[zeropg] shard_optimizer: no param group holds {len(missing)} trainable parameters "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); they stay as they are unless "
                "another optimizer steps them",
                stacklevel=4,
            )

    def _check_origin(self, origin: Mapping[str, Any]) -> None:
        here = (self._core.rank, self._core.world_size)
        there = (origin["rank"], origin["world_size"])
        ranges = {name: tuple(kept) for name, kept in origin["ranges"].items()}
        if there != here or any(ranges.get(name) != kept for name, kept in self.local_ranges().items()):
            raise ValueError(
                f"[zeropg rank {here[0]}/{here[1]}] load_state_dict: this optimizer state holds the shards of rank "
                f"{there[0]}/{there[1]}{' of another sharding' if there == here else ''}; use zeropg.load_checkpoint, "
                "which loads at any world size"
            )


def _core_of(model: torch.nn.Module) -> Any:
    core = getattr(model, "_zeropg", None)
    if core is None:
        raise TypeError(
            f"[zeropg] shard_optimizer: {type(model).__name__} is not sharded; call zeropg.fully_shard(model) first"
        )
    return core


def _check_is_not_sharded(optimizer: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        raise TypeError("[zeropg] shard_optimizer: this optimizer is sharded already")
    own_step = getattr(optimizer, "__dict__", {}).get("step")
    if getattr(own_step, "__qualname__", "").startswith("ShardedOptimizer."):
        raise TypeError("[zeropg] shard_optimizer: this optimizer was sharded before; use what that call returned")


def _changed(name: str, option: str) -> str:
    return (
        f"[zeropg] step: {option} of the param group of {name} was changed, and the optimizer has begun: its state is "
        "kept otherwise. Set it back, or make another optimizer"
        + ("" if option == "use_muon" else "; or pass state_dict() to load_state_dict, which converts")
    )


def _check_has_its_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers wrap the class's own step on the object; what a program puts there would not be called."""
    put = vars(optimizer).get("step")
    put = getattr(put, "_torchdynamo_orig_callable", put)
    own = getattr(put, "__func__", None) or getattr(put, "__wrapped__", None)
    if put is not None and own is not type(optimizer).step:
        raise NotImplementedError(
            f"[zeropg] shard_optimizer: the step of this {type(optimizer).__name__} was replaced on the object, and a "
            "sharded step would not call what was put there; put it on what shard_optimizer returns, or use "
            "register_step_pre_hook and register_step_post_hook"
        )
