"""DeepSpeed's `safe_get_...` and `safe_set_...`: fp32 masters, gradients and optimizer state of one parameter.

Those of whole values communicate: all ranks must call them, alike. Those of local values give this rank's part, which
may be empty: shards are ranges of a unit, not of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.deepspeed.tensor_parallel.whole_values import numel_here, part_of_whole, whole_gradient, whole_of
from zeropg.deepspeed.zero.owners import Place, place_of
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.agreement import collective_device, together
from zeropg.sharding.access import full_gradients, local_shards, writable_shards
from zeropg.tensor_parallel.distributed import local_of


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of the whole master, in the parameter's shape; None for a parameter of no engine."""
    place = place_of(param)
    if place is None:
        return None
    place.state.settle_writes("safe_get_full_fp32_param")
    gathered: torch.Tensor = place.group.gather_master()
    return whole_of(param, gathered[place.offset : place.offset + numel_here(param)].clone())


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the master, and the parameter with it. `value` has its shape and is the same on every rank."""
    place = _place(param, "safe_set_full_fp32_param")
    _check_shapes(place, param, value, "safe_set_full_fp32_param")
    part = part_of_whole(param, value)
    with writable_shards(place.engine.module) as shards:
        for name, tensor, start, stop in shards:
            if name == place.name:
                tensor.copy_(part[start:stop])


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of the whole averaged gradient in the master's dtype, between backward and step.

    Divided by the accumulation steps; it still carries the loss scale (`engine.cur_scale`). None where there is no
    gradient. Raises RuntimeError in stages 0 and 1 before a boundary, when gradients are not averaged yet.
    """
    place = place_of(param)
    if place is None or param.grad is None:
        return None
    with full_gradients(place.engine.module):
        assert param.grad is not None
        return whole_gradient(param.grad * place.engine.gradient_factor)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the averaged gradient, which has to be there. `value` has its shape and is the same on every rank."""
    place = _place(param, "safe_set_full_grad")
    _check_shapes(place, param, value, "safe_set_full_grad")
    _need_gradient(param, "safe_set_full_grad")
    with full_gradients(place.engine.module):
        assert param.grad is not None
        _set_gradient(param, value / place.engine.gradient_factor)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Sets the averaged gradient of each parameter that has one to update_func(gradient, parameter), whole.

    All gradients of an engine are gathered once. The function gets the gradient in the parameter's shape and the
    master's dtype, and returns the same on every rank.
    """
    operation = "safe_update_full_grad_vectorized"
    places = [(_place(param, operation), param) for param in param_list if param.grad is not None]
    for engine in dict.fromkeys(place.engine for place, _ in places):
        with full_gradients(engine.module):
            for place, param in places:
                if place.engine is engine:
                    assert param.grad is not None
                    value = update_func(whole_gradient(param.grad * engine.gradient_factor), param)
                    _check_shapes(place, param, value, operation)
                    _set_gradient(param, value / engine.gradient_factor)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns a copy of the whole state of that key ("exp_avg", "exp_avg_sq", ...); None for one of no engine.

    Raises KeyError on every rank where there is no such state, as before the first step.
    """
    place = place_of(param)
    if place is None:
        return None
    optimizer, group = _optimizer(place), place.state.core.process_group
    numel = numel_here(param)
    own = torch.zeros(numel, dtype=place.group.master_dtype)
    found = torch.zeros(1, dtype=torch.int64)
    for name, key, values, start, stop in optimizer.local_state():
        if (name, key) == (place.name, optim_state_key) and place.state.core.replica == 0:
            own[start:stop] = values.cpu()
            found += stop - start
    # Each element is one rank's and zero elsewhere, so the sum keeps every bit but the sign of a zero.
    for tensor in (own, found):
        moved = tensor.to(collective_device(group))
        dist.all_reduce(moved, group=group)
        tensor.copy_(moved)
    has_all = found == numel
    known = sorted({key for _, key, *_ in optimizer.local_state()})
    seen = together(
        place.state.parallel.everybody,
        "safe_get_full_optimizer_state",
        lambda: [bool(has_all), optim_state_key in known],
    )
    if not all(has for has, _ in seen) or not any(knows for _, knows in seen):
        there = f"this optimizer keeps {', '.join(known)}" if known else "states come with the first step"
        raise KeyError(f"[zeropg] safe_get_full_optimizer_state: '{place.name}' has no {optim_state_key!r}; {there}")
    return whole_of(param, own.to(param.device))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets the state of that key. `value` has the parameter's shape and is the same on every rank."""
    place = _place(param, "safe_set_full_optimizer_state")
    _check_shapes(place, param, value, "safe_set_full_optimizer_state")
    start, stop = _optimizer(place).local_ranges().get(place.name, (0, 0))
    if start < stop:
        _local_state(place, param, optim_state_key).copy_(part_of_whole(param, value)[start:stop])


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """Returns a copy of this rank's part of the master, 1-D."""
    place = _place(param, "safe_get_local_fp32_param")
    for name, tensor, _, _ in local_shards(place.engine.module):
        if name == place.name:
            return tensor.clone()
    return torch.empty(0, dtype=place.group.master_dtype)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of the master. All ranks must call: what was written is published to all."""
    place = _place(param, "safe_set_local_fp32_param")
    with writable_shards(place.engine.module) as shards:
        for name, tensor, _, _ in shards:
            if name == place.name:
                tensor.copy_(value.reshape(-1))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of this rank's part of the averaged gradient, 1-D; None where there is no gradient."""
    place = _place(param, "safe_get_local_grad")
    view = _local_gradient(place, param)
    return None if view is None else view * place.engine.gradient_factor


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of the averaged gradient, in stages 2 and 3. Does not communicate."""
    place = _place(param, "safe_set_local_grad")
    _need_gradient(param, "safe_set_local_grad")
    if place.state.core.stage < 2:
        raise NotImplementedError(
            "[zeropg] safe_set_local_grad: in stages 0 and 1 every rank has whole gradients; write param.grad, alike "
            "on all ranks"
        )
    view = _local_gradient(place, param)
    assert view is not None  # as _need_gradient says
    view.copy_(value.reshape(-1) / place.engine.gradient_factor)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """Returns a copy of this rank's part of that state, 1-D. Raises KeyError where there is none yet."""
    place = _place(param, "safe_get_local_optimizer_state")
    start, stop = _optimizer(place).local_ranges().get(place.name, (0, 0))
    return _local_state(place, param, optim_state_key).clone() if start < stop else torch.empty(0)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of the state of that key. Does not communicate."""
    place = _place(param, "safe_set_local_optimizer_state")
    start, stop = _optimizer(place).local_ranges().get(place.name, (0, 0))
    if start < stop:
        _local_state(place, param, optim_state_key).copy_(value.reshape(-1))


def _place(param: nn.Parameter, call: str) -> Place:
    place = place_of(param)
    if place is None:
        raise ValueError(
            f"[zeropg] {call}: the parameter of shape {list(param.shape)} belongs to no engine; expected one of "
            "a model that initialize was given"
        )
    return place


def _optimizer(place: Place) -> ShardedOptimizer:
    optimizer = place.engine.optimizer
    if not isinstance(optimizer, ShardedOptimizer):
        raise RuntimeError("[zeropg] optimizer state: this parameter's engine has no optimizer")
    return optimizer


def _local_state(place: Place, param: nn.Parameter, key: str) -> torch.Tensor:
    if place.state.core.optimizer_offload is not None:
        raise NotImplementedError(
            "[zeropg] optimizer state: it is in a file (offload_optimizer); read it whole with "
            "safe_get_full_optimizer_state, which all ranks call"
        )
    state: dict[str, Any] = _optimizer(place).state.get(param, {})
    tensor = state.get(key)
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8:
        raise NotImplementedError(
            "[zeropg] optimizer state: it is packed (state_bits=8); read it whole with safe_get_full_optimizer_state, "
            "which all ranks call"
        )
    if not isinstance(tensor, torch.Tensor):
        known = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
        why = f"it has {', '.join(known)}" if known else "state comes with the first step"
        raise KeyError(f"[zeropg] optimizer state: '{place.name}' has no {key!r}; {why}")
    return tensor


def _local_gradient(place: Place, param: nn.Parameter) -> torch.Tensor | None:
    gradient = place.group.grad()
    if param.grad is None or gradient is None:
        return None
    for name, first, start, stop in place.group.local_shards:
        if name == place.name:
            view: torch.Tensor = gradient[first : first + stop - start]
            return view
    return torch.empty(0, dtype=gradient.dtype)


def _check_shapes(place: Place, param: nn.Parameter, value: torch.Tensor, call: str) -> None:
    """On all ranks together: one that stays behind would leave the others waiting."""

    def check() -> None:
        if value.shape != param.shape:
            raise ValueError(f"the value has shape {list(value.shape)}, expected {list(param.shape)}")

    together(place.state.parallel.everybody, call, check)


def _set_gradient(param: nn.Parameter, value: torch.Tensor) -> None:
    assert param.grad is not None
    own = local_of(param.grad)  # its strides may be other ones than the value's
    own.copy_(part_of_whole(param, value).view(own.shape))


def _need_gradient(param: nn.Parameter, call: str) -> None:
    if param.grad is None:
        raise RuntimeError(f"[zeropg] {call}: the parameter has no gradient; call it between backward and step")
