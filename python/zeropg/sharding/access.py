"""Whole parameters and gradients, local shards, accumulation without communication, clipping."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from zeropg._native import _C
from zeropg.rank_io.agreement import check_same, collective_device, peers_needed
from zeropg.sharding.state import ShardedState, state_of

# Name, tensor, and which elements of the flattened parameter it holds: [start, stop).
Shard = tuple[str, torch.Tensor, int, int]


@contextlib.contextmanager
def full_parameters(model: nn.Module, *, writable: bool = False) -> Iterator[None]:
    """Makes every parameter whole on every rank inside the `with`: its own shape and dtype. All ranks must enter and
    leave.

    Needs memory for the whole model where parameters are not shared inside the node. With weights= of a compression
    plan, stage 3 gathers them here as they are; in stages 1 and 2 they show what forwards compute with, which follows
    the masters by differences: `full_state_dict` has those.

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
        writable: True: what is written inside becomes the parameters' value, also after an exception. Every rank must
            write the same values. Elements that are not changed keep their masters' full precision. False: a write
            raises RuntimeError in stage 3; in stages 0 to 2, where parameters are always whole, it counts as any other.

    Raises:
        ValueError: `model` is not sharded; on every rank, where `writable` differs between ranks.
        RuntimeError: on every rank, where ranks have written different values.
        OSError: on every rank, where one cannot write its masters to their file (offload_optimizer). Make the model
            anew, from a checkpoint.
    """
    operation = "full_parameters"
    state = state_of(model, operation)
    core = state.core
    depth = core.full_depth
    # Inside another one nothing communicates; inside a backward, it would meet reductions, and writes are refused.
    if depth == 0 and torch._C._current_graph_task_id() == -1:
        _meet(state, operation, writable)
    with state.forwards_aside():
        try:
            core.unshard_all(writable)  # a signal may be handled at its very end
            yield
        finally:
            if core.full_depth > depth:
                core.reshard_all()


def _meet(state: ShardedState, operation: str, writable: bool) -> None:
    """Raises ValueError on every rank where `writable` differs. Collective."""
    state.pay_visit()
    group = state.core.process_group
    flag = torch.tensor([writable], dtype=torch.int64, device=collective_device(group))
    flags = [torch.empty_like(flag) for _ in range(group.size())]
    with peers_needed(group, operation):
        work = dist.all_gather(flags, flag, group=group, async_op=True)
        state.owed_visit = bool(writable)
        work.wait()  # a signal handler may raise here, while the others go on
    state.owed_visit = None
    check_same(group, operation, [{"writable": str(bool(value))} for value in flags])


@contextlib.contextmanager
def full_gradients(model: nn.Module) -> Iterator[None]:
    """Makes every `.grad` whole on every rank inside the `with`. All ranks must enter.

    `.grad` is the averaged gradient then, in the parameter's shape and the master's dtype. What is written to it
    inside, alike on all ranks, is the gradient afterwards; in stages 2 and 3 it is so from the end of the outermost
    `with` on. Forward and torch.autograd.grad may be called inside.

    Raises ValueError for a model that is not sharded. Inside, in stages 2 and 3, a backward that would add to `.grad`
    raises RuntimeError, and so do clip_grad_norm_, unscale_, step and zero_grad(set_to_none=False).
    """
    state = state_of(model, "full_gradients")
    _check_averaged(state.core, "full_gradients")
    state.full_gradients_depth += 1
    try:
        state.core.show_full_gradients()  # a signal may be handled at its very end
        yield
    finally:
        state.full_gradients_depth -= 1
        if state.full_gradients_depth == 0:
            state.core.hide_full_gradients()


def local_shards(model: nn.Module) -> Iterator[Shard]:
    """Yields (name, tensor, start, stop) for the part of each parameter that this rank owns. Does not communicate.

    Over all ranks every parameter is covered exactly once, in every stage; where a mesh replicates, once in each copy
    of the model. Beside tensor parallelism start and stop count in this rank's part of a DTensor (its `to_local()`),
    and each rank of that dimension yields what several of them have.

    tensor: [stop - start] in the master's dtype: elements [start, stop) of the flattened parameter. It is a live view;
      numpy(), torch.save and collectives may read it, and a write to it raises RuntimeError (`writable_shards` takes
      writes). With masters in a file (offload_optimizer) it is a copy on the CPU, read when the iterator comes to it.

    Raises ValueError for a model that is not sharded.
    """
    core = state_of(model, "local_shards").core
    core.refresh_own_masters()
    for _, name, _, tensor, start, stop in _own_masters(core):
        message = (
            f"[zeropg] local_shards: the shard of '{name}' can only be read, since other ranks would not see what is "
            "written; write it inside `with zeropg.writable_shards(model) as shards:`, which publishes it."
        )
        yield name, core.read_only_shard(tensor, message), start, stop


@contextlib.contextmanager
def writable_shards(model: nn.Module) -> Iterator[list[Shard]]:
    """Gives the list of what `local_shards` yields, with tensors that may be written. All ranks must enter and leave.

    When the `with` ends, also after an exception, what was written is published to all ranks: to the masters, and in
    each parameter's own dtype to what forwards read. Each rank writes its own part, so ranks need not write alike; but
    on a mesh that replicates, the replicas of a part must (RuntimeError on every rank). With masters in a file
    (offload_optimizer) the list holds copies of all of this rank's masters in memory.

    Raises ValueError for a model that is not sharded. Inside, forward, full_parameters and steps raise RuntimeError. A
    backward of what was computed before is not refused: write what no graph needs, or between a step and a forward.
    """
    state = state_of(model, "writable_shards")
    state.check_may_write("writable_shards")
    core = state.core
    core.begin_step()
    state.is_writing_shards = True
    shards = list(_own_masters(core))
    try:
        yield [(name, tensor, start, stop) for _, name, _, tensor, start, stop in shards]
    finally:
        try:
            for group, _, first, tensor, _, _ in shards:
                if group.tiered_master is not None:
                    group.write_master(first, tensor)
            core.publish_shards()
        finally:
            state.is_writing_shards = False
            is_same = core.end_load()
        check_replicas(state, "writable_shards", is_same)


def check_replicas(state: ShardedState, operation: str, is_same: bool) -> None:
    """Raises RuntimeError, on every rank, where the core's end_load has said that replicas had different masters."""
    core = state.core

    def check() -> None:
        if not is_same:
            raise RuntimeError(
                f"[zeropg rank {core.rank}/{core.world_size}] {operation}: the replicas of a slice set different "
                "values; expected the same ones. Values of the first replica were kept. Compute or read the same on "
                "every rank (torch.distributed.broadcast or all_reduce it first)."
            )

    state.parallel.together(operation, check)


def _own_masters(core: _C.ShardedModule) -> Iterator[tuple[_C.FlatGroup, str, int, torch.Tensor, int, int]]:
    """Yields (group, name, first, tensor, start, stop): the tensor is elements [first, ...) of the group's masters."""
    for group in core.flat_groups:
        for name, first, start, stop in group.local_shards:
            yield group, name, first, group.read_master(first, first + stop - start), start, stop


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication inside the `with`; the first backward after it reduces the sum.

    Entering does not communicate, but all ranks must run the same number of backwards inside and after it. In stages 2
    and 3 each rank holds whole gradients meanwhile (a warning on rank 0 says so once). Raises ValueError for a model
    that is not sharded.
    """
    state = state_of(model, "no_sync")
    if state.core.stage >= 2 and not state.has_said_full_gradients:
        state.has_said_full_gradients = True
        if state.parallel.everybody.rank() == 0:
            warnings.warn(
                f"[zeropg] no_sync in stage {state.core.stage}: each rank holds whole gradients until the next "
                "backward outside of it. To keep them sharded, leave no_sync away: every backward then reduces.",
                stacklevel=3,
            )
    before = state.core.synchronizes
    state.core.set_synchronize(False)
    try:
        yield
    finally:
        state.core.set_synchronize(before)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales all gradients so that their total norm is at most max_norm; returns the norm before. All ranks must call.

    The norm is that of the averaged gradient of the whole model. It is summed in fp64 in one order, so it has the same
    bits on every rank and in every stage. Gradients of `ignored_params` are neither counted nor scaled, since each rank
    may have its own.

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
        max_norm: at least 0.
        norm_type: p of the p-norm, more than 0; float("inf") for the largest magnitude.
        error_if_nonfinite: raise instead of scaling by a norm that is inf or nan.

    Returns:
        A scalar tensor in the masters' dtype, on the CPU.

    Raises:
        ValueError: `model` is not sharded, or a number is out of range, or not the same on all ranks of one copy of the
            model, or of other parts of its tensors. (Over replicas, and error_if_nonfinite, the next step compares.)
        RuntimeError: called inside `full_gradients` (stages 2, 3); or the norm is inf or nan, with error_if_nonfinite.
    """
    state = state_of(model, "clip_grad_norm_")
    state.check_outside_full_gradients("clip_grad_norm_")
    core = state.core
    _check_averaged(core, "clip_grad_norm_")
    max_norm, norm_type = float(max_norm), float(norm_type)
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"[zeropg] clip_grad_norm_: max_norm is {max_norm}; expected a number >= 0.")
    if math.isnan(norm_type) or norm_type <= 0:
        raise ValueError(f"[zeropg] clip_grad_norm_: norm_type is {norm_type}; expected a number > 0, or float('inf').")
    state.clipped = max_norm, norm_type, bool(error_if_nonfinite)  # the next step compares what is not compared here
    norm = core.clip_grad_norm(max_norm, norm_type, error_if_nonfinite)
    trainable = [group.master_dtype for group in core.flat_groups if group.is_trainable]
    return torch.tensor(norm, dtype=trainable[0] if trainable else torch.float32)


def _check_averaged(core: _C.ShardedModule, operation: str) -> None:
    if not core.averages_gradients:
        raise RuntimeError(
            f"[zeropg rank {core.rank}/{core.world_size}] {operation}: the model's optimizer averages momenta, so "
            "gradients are each rank's own; clip by the optimizer's clip=, and read `.grad`, which is local."
        )
