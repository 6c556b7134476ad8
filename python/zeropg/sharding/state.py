"""What Python keeps about a sharded model beside the C++ core: its modules, its hooks and who may have changed it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless

from zeropg._native import _C
from zeropg.compression.coding import Coding
from zeropg.sharding.buffers import explain_other_dtypes
from zeropg.sharding.model_codecs import ModelCodecs
from zeropg.sharding.nested import Replacement, hidden_tensors_in, is_plain, tensors_in
from zeropg.sharding.running_statistics import modules_with_statistics
from zeropg.sharding.trace import TraceRecorder, requested_trace
from zeropg.sharding.transforms import beneath, is_transformed, outside_transforms
from zeropg.sharding.units import UnitPlan
from zeropg.tensor_parallel.groups import TensorParallel


class PendingSave(Protocol):
    """A checkpoint that is being written in the background."""

    def wait(self, timeout: float | None = None) -> None: ...


_LISTED = 40  # names in one message


@dataclass
class ShardedState:
    """One per sharded model, on the root as `_zeropg_state`; `_zeropg` is its core."""

    model: nn.Module
    core: _C.ShardedModule
    plans: list[UnitPlan]
    param_dtype: torch.dtype | None
    parallel: TensorParallel
    # Every module as it was: its dictionaries, which users write to, and copies of them.
    contents: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    with_statistics: list[nn.Module] = field(default_factory=list)  # batch norms
    has_said_full_gradients: bool = False
    has_said_replicas: bool = False
    pending_save: PendingSave | None = None  # the last save_checkpoint(async_save=True)
    full_gradients_depth: int = 0  # of `with zeropg.full_gradients`
    is_loading: bool = False  # inside load_state_dict
    is_writing_shards: bool = False  # inside `with zeropg.writable_shards`
    is_label: Callable[[str], bool] | None = None  # which keyword arguments of the root keep their dtype
    is_absorbed: bool = False  # in a larger model, whose state counts from then on
    clipped: tuple[float, float, bool] | None = None  # what clip_grad_norm_ was last called with
    has_average: bool = False  # in place of its own weights: inside `average_parameters` of a zeropg.ema
    trace: TraceRecorder | None = None  # until all that is to be recorded has been
    codecs: ModelCodecs | None = None  # with compression
    casts_inputs: bool = True  # the root's floating inputs, to param_dtype
    owed_visit: bool | None = None  # `writable` of a full_parameters that this rank left while it met the others
    _is_functional: bool = False
    _running: list[tuple[int, bool]] = field(default_factory=list)  # units whose forward runs; with gradients?

    def __post_init__(self) -> None:
        self.with_statistics = modules_with_statistics(self.model)
        request = requested_trace()
        self.trace = None if request is None else TraceRecorder(self.core, request)
        for name, module in self.model.named_modules():
            self.contents.append((name, module, dict(module._parameters), dict(module._modules)))
        for index, plan in enumerate(self.plans):
            vars(plan.module)["_zeropg_unit"] = (self, index)

    def run(
        self,
        index: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        casts_inputs: bool = True,
    ) -> Any:
        """Calls a unit with its parameters whole: around its hooks, and around what torch.compile made of it.

        casts_inputs: whether the root's floating inputs are cast to param_dtype, but for what `is_label` names.
        """
        is_root = index == len(self.plans) - 1
        if is_root:
            self.pay_visit()
        if is_root and self.trace is not None and not self.trace.next_forward():
            self.trace = None
        if is_root and (outer := DistributedDataParallel._active_ddp_module) is not None:
            self._check_not_averaged_by(outer)
        if self._is_functional or (is_root and self._replaces_everything()):
            return self._run_functional(call, args, kwargs)
        replaced: list[Replacement] = []
        try:
            if is_root and self.param_dtype is not None and casts_inputs and self.casts_inputs:
                labels = {key: value for key, value in kwargs.items() if self.is_label and self.is_label(key)}
                inputs = (args, {key: value for key, value in kwargs.items() if key not in labels})
                floating = [tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()]
                replaced.append(_replace(inputs, floating, [t.to(self.param_dtype) for t in floating]))
                args, kwargs = replaced[-1].value
                kwargs = {**kwargs, **labels}
            if (aliased := self._before(index, args, kwargs)) is not None:
                replaced.append(aliased)
                args, kwargs = aliased.value
            self._running.append((index, torch.is_grad_enabled()))
            try:
                output = call(*args, **kwargs)
                outputs = [*tensors_in(output), *hidden_tensors_in(output)] if torch.is_grad_enabled() else []
                outputs += beneath(outputs)
            except BaseException as error:
                self._abandon(index)
                explain_other_dtypes(error, self.plans[index], self.param_dtype)
                raise
            finally:
                self._running.pop()
        finally:
            for replacement in reversed(replaced):
                replacement.undo()
        with outside_transforms():
            self.core.post_forward(index, outputs)
        return output

    def _before(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replacement | None:
        """Makes the unit whole; in stage 3 its inputs tell when their gradients are there."""
        if self.core.stage < 3 or not torch.is_grad_enabled():
            with outside_transforms():
                self.core.pre_forward(index, [], False)
            return None
        wanted = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        tensors = [] if is_transformed() else [tensor for tensor in wanted if is_plain(tensor)]
        has_others = len(tensors) < len(wanted)
        has_others = has_others or any(tensor.requires_grad for tensor in hidden_tensors_in((args, kwargs)))
        with outside_transforms():
            aliases = self.core.pre_forward(index, tensors, has_others)
        try:
            return _replace((args, kwargs), tensors, aliases) if tensors else None
        except BaseException:
            self._abandon(index)
            raise

    def _abandon(self, index: int) -> None:
        with outside_transforms():
            self.core.abandon_forward(index)

    @contextmanager
    def forwards_aside(self) -> Iterator[None]:
        """For what shards all units when it is over: those whose forward runs are whole again after the `with`."""
        running = self._running if self.core.stage == 3 else []
        if not running:
            yield
            return
        self._running = []
        for index, _ in reversed(running):
            self._abandon(index)
        try:
            yield
        finally:
            self._running = running
            for index, has_gradients in running:
                with torch.set_grad_enabled(has_gradients), outside_transforms():
                    self.core.pre_forward(index, [], True)  # of its inputs some may be watched: it waits for all

    def pay_visit(self) -> None:
        """Takes part in a full_parameters that a signal handler took this rank away from, without its body."""
        if self.owed_visit is None:
            return
        writable, self.owed_visit = self.owed_visit, None
        self.core.unshard_all(writable)
        self.core.reshard_all()

    def settle_writes(self, operation: str) -> None:
        """What programs have written reaches the masters; collective."""
        self._check_not_absorbed(operation)
        self.pay_visit()
        with self.forwards_aside():
            self.parallel.together(operation, lambda: self.core.settle_writes(operation))

    def _run_functional(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside torch.func.functional_call with tensors for all parameters: ours are not used."""
        before, self._is_functional = self._is_functional, True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_functional = before

    @property
    def coding(self) -> Coding | None:
        """What its codecs have done so far; None without compression."""
        return None if self.codecs is None else self.codecs.coding

    def begin_step(self) -> None:
        """With compression="auto" measures again at times; collective."""
        if self.codecs is not None and self.codecs.next_step():
            self.core.set_codecs(self.codecs.rows())

    def warn_of_replicas(self) -> None:
        """Once, where parameters are not the masters' values to the last bit."""
        has_to_say = not self.is_loading and not self.has_said_replicas
        if not has_to_say or not any(group.sends_differences for group in self.core.flat_groups):
            return
        self.has_said_replicas = True
        warnings.warn(
            f"{self._context('state_dict')} updates travel encoded (Plan(weights=...)), so these are the replicas that "
            "the model computes with, up to a rounding of their updates from the masters; for the masters use "
            "zeropg.full_state_dict(model), or zeropg.save_checkpoint",
            stacklevel=3,
        )

    def check_outside_full_gradients(self, operation: str) -> None:
        """Raises RuntimeError where `.grad` shows copies, whose values would replace what `operation` does."""
        if self.full_gradients_depth > 0 and self.core.stage >= 2:
            raise RuntimeError(
                f"{self._context(operation)} called inside full_gradients, where `.grad` is a copy of the sharded "
                "gradient that replaces it when the `with` ends; call it after."
            )

    def check_outside_writable_shards(self, operation: str) -> None:
        """Raises RuntimeError where the user writes masters, or copies of them that replace them later."""
        if self.is_writing_shards:
            raise RuntimeError(f"{self._context(operation)} called inside zeropg.writable_shards; call it after.")

    def check_may_write(self, operation: str) -> None:
        """Raises RuntimeError where new masters would meet what still uses the old ones."""
        self._check_not_absorbed(operation)
        self.pay_visit()
        self.check_outside_writable_shards(operation)
        if self._running and self.core.stage == 3:
            raise RuntimeError(
                f"{self._context(operation)} called inside a forward of the model, whose units would be sharded before "
                "it ends; call it after."
            )

    def _check_not_absorbed(self, operation: str) -> None:
        if self.is_absorbed:
            raise RuntimeError(
                f"{self._context(operation)} this optimizer, or average, was made for a model that has become a unit "
                "of a larger sharded model; make another one for that model."
            )

    def check_has_own_weights(self, operation: str) -> None:
        """Raises RuntimeError where the model has an average, which `operation` would take for its weights."""
        if self.has_average:
            raise RuntimeError(
                f"{self._context(operation)} called inside average_parameters of zeropg.ema, where the model has the "
                "averages and not its own weights; call it after the `with`."
            )

    def _context(self, operation: str) -> str:
        return f"[zeropg rank {self.core.rank}/{self.core.world_size}] {operation}:"

    def _replaces_everything(self) -> bool:
        """Whether functional_call has put other tensors in place of all parameters; for some, those are used.

        Raises RuntimeError where parameters were changed by anything else.
        """
        replaced = self._replaced()
        if replaced and _is_in_functional_call():
            return {name for name, _ in self.model.named_parameters()} <= set(replaced)
        if changed := replaced or self.core.changed_parameters():
            raise self._changed("forward", changed)
        return False

    def check_modules(self, operation: str) -> None:
        """Raises RuntimeError where parameters are not those, or not where, they were at fully_shard.

        A further name for one of them (`model.head = model.layers[0]`) does no harm outside of a forward.
        """
        if _is_in_functional_call() or not (changed := self._replaced()):
            return
        before = {
            ".".join(filter(None, (prefix, key))): parameter
            for prefix, _, parameters, _ in self.contents
            for key, parameter in parameters.items()
        }
        known = {id(parameter) for parameter in before.values()}
        now = dict(self.model.named_parameters(remove_duplicate=False))
        if changed := [name for name in changed if name in before or id(now.get(name)) not in known]:
            raise self._changed(operation, changed)

    def _changed(self, operation: str, names: list[str]) -> RuntimeError:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return RuntimeError(
            f"{self._context(operation)} {', '.join(map(repr, names[:_LISTED]))}{more} changed after fully_shard "
            "(replaced, added, moved, cast or resized); expected the parameters that were sharded. Make such changes "
            "before fully_shard; to set values use `with zeropg.full_parameters(model, writable=True):` or "
            "zeropg.load_full_state_dict."
        )

    def _replaced(self) -> list[str]:
        names: list[str] = []
        for prefix, module, parameters, children in self.contents:
            for before, after in ((parameters, module._parameters), (children, module._modules)):
                if before.keys() == after.keys() and all(after[key] is value for key, value in before.items()):
                    continue
                for key in {**before, **after}:
                    old, new = before.get(key), after.get(key)
                    if old is not new:
                        names += _parameter_names(".".join(filter(None, (prefix, key))), new if old is None else old)
        return names

    def _check_not_averaged_by(self, outer: DistributedDataParallel) -> None:
        """Raises RuntimeError for a DistributedDataParallel around the model, which would take its gradients away."""
        sharded = {id(parameter) for plan in self.plans for _, parameter in plan.parameters}
        if any(id(parameter) in sharded for parameter in outer._module_parameters):
            raise RuntimeError(
                f"{self._context('forward')} the sharded model is inside a DistributedDataParallel, and both would "
                "average its gradients; expected one of them: call the sharded model itself, whose gradients are "
                "averages."
            )

    def ignored_parameters(self) -> Iterator[nn.Parameter]:
        known = {id(parameter) for plan in self.plans for _, parameter in plan.parameters}
        return (parameter for parameter in self.model.parameters() if id(parameter) not in known)


def _replace(value: Any, tensors: list[torch.Tensor], new: Sequence[torch.Tensor]) -> Replacement:
    return Replacement(value, {id(old): other for old, other in zip(tensors, new, strict=True)})


def names_label(argument: str) -> bool:
    """Whether a keyword argument of a model is taken by its loss and by none of its layers: Hugging Face's rule, and
    the count that its Trainer passes for losses to be divided by."""
    return "label" in argument or argument == "num_items_in_batch"


def _is_in_functional_call() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _parameter_names(name: str, value: nn.Module | torch.Tensor | None) -> list[str]:
    if isinstance(value, nn.Module):
        return [f"{name}.{key}" for key, _ in value.named_parameters(remove_duplicate=False)]
    return [name]


def state_of(model: nn.Module, operation: str) -> ShardedState:
    """Returns the state of a sharded model. Raises ValueError naming `operation` where the model is not one's root."""
    state = unchecked_state_of(model, operation)
    state.check_modules(operation)
    return state


def check_sharded_as(model: nn.Module, asked: Mapping[str, Any], operation: str) -> None:
    """Raises ValueError where a model is sharded in another way than is asked for: `stage` and `param_dtype`."""
    state = state_of(model, operation)
    for name, has in (("stage", state.core.stage), ("param_dtype", state.param_dtype)):
        if asked.get(name, has) != has:
            raise ValueError(
                f"[zeropg] {operation}: this {type(model).__name__} is sharded already, with {name}={has}, and "
                f"{name}={asked[name]} is asked for; expected the same, since a model stays as it was sharded: ask for "
                "that (mixed precision says param_dtype, too), or build a new model"
            )


def unchecked_state_of(model: nn.Module, operation: str) -> ShardedState:
    """As `state_of`, before its check_modules: for what lets all ranks know of an error in that."""
    state = getattr(model, "_zeropg_state", None)
    if isinstance(state, ShardedState):
        return state
    if not isinstance(model, nn.Module):
        raise TypeError(f"[zeropg] {operation}: expected a module, got {type(model).__name__}.")
    hint = (
        "it is a unit of a larger sharded model: pass that model"
        if getattr(model, "_zeropg_is_unit", False)
        else "call zeropg.fully_shard(model) first"
    )
    raise ValueError(f"[zeropg] {operation}: this {type(model).__name__} is not a sharded model; {hint}.")
