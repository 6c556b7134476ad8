"""Makes process groups for torch.distributed and answers questions about them."""

from __future__ import annotations

import atexit
import gc
import inspect
import itertools
import logging
import math
import os
import statistics
import sys
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.distributed_c10d import PrefixStore

from zeropg._native import _C
from zeropg.compression.coding import coding_statistics
from zeropg.rank_io.agreement import broadcast_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Backend, Store
    from torch.distributed import ProcessGroup

BackendOptions: Any = _C.BackendOptions
Topology: Any = _C.Topology

logger = logging.getLogger("zeropg")

_LAST_WORK_SECONDS = 0.2
_made_groups = itertools.count()  # whose names this rank has given

# The progress thread must have ended before the interpreter's state goes away.
atexit.register(_C.shutdown_all)


def create_backend(distributed_backend_options: Any, pg_options: Any) -> Backend:
    """Creates the backend of one process group; torch.distributed calls it with its extended API on every rank.

    distributed_backend_options: c10d's description of the group (store, rank, size, timeout).
    pg_options: a `BackendOptions` or None. Its `timeout` gives way to the group's.
    Raises TypeError for options of another backend, DistBackendError when ranks do not come in time.
    """
    given = distributed_backend_options
    if pg_options is None:
        options = BackendOptions()
    elif isinstance(pg_options, BackendOptions):
        options = pg_options.__copy__()
    else:
        raise TypeError(
            f"[zeropg] pg_options is a {type(pg_options).__module__}.{type(pg_options).__qualname__}, expected a "
            "zeropg.BackendOptions; torch hands one pg_options to every backend of a group, so mixed groups such as "
            "'cpu:zeropg,cuda:nccl' cannot take any"
        )
    if getattr(given, "enable_reconfigure", False):
        options.enable_reconfigure = True
    options._timeout = given.timeout
    options.group_name = given.group_id
    options.global_ranks_in_group = given.global_ranks_in_group
    _give_known_links(options)
    make_cuda_backend = _make_nccl if torch.cuda.is_available() else None
    backend = _C.ProcessGroupZero(given.store, given.group_rank, given.group_size, options, make_cuda_backend)
    if not _torch_records():
        backend.start_recording()
    if get_debug_level() != DebugLevel.OFF and not getattr(given, "enable_reconfigure", False):
        _say_what_was_made(backend, given.group_id)
    return cast("Backend", backend)


def _give_known_links(options: Any) -> None:
    """What the default group knows of the links, which a further group need not measure again."""
    world = dist.group.WORLD
    if world is not None and torch.device("cpu") in world._device_types:
        backend = unwrapped_backend(world, torch.device("cpu"))
        if isinstance(backend, _C.ProcessGroupZero):
            backend.give_links(options)


def leave_groups() -> None:
    """Destroys the process groups of a program that ends, once nothing of it holds them; its models are no longer held.

    A model is full of reference cycles, and it holds its group: gloo's threads would outlive the group's destruction,
    and abort the process where one of them frees a tensor while the interpreter ends.
    """
    gc.collect()
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    if any(group() is not None for group in groups):
        # torch's own caches hold it (DTensor's, after FSDP2), and gloo has no shutdown: its threads live on, but not
        # with a tensor, once they have dropped the last operation's.
        time.sleep(_LAST_WORK_SECONDS)


def _torch_records() -> bool:
    """Whether torch's own flight recorder sees the operations of any backend (2.15)."""
    return hasattr(dist.distributed_c10d, "FlightRecorderHook")


def _say_what_was_made(backend: Any, name: str) -> None:
    """TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL: one line per group and rank."""
    nodes = backend.topology().nodes
    line = (
        f"[zeropg rank {backend.rank()}/{backend.size()}] made the group '{name}': {backend.size()} ranks on "
        f"{len(nodes)} node{'s' * (len(nodes) > 1)}, timeout {backend.options._timeout.total_seconds():g} s, "
        f"pid {os.getpid()}"
    )
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        print(line, file=sys.stderr)  # whoever asks torch for details sees them without setting up logging


def _make_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Makes NCCL's process group; the core calls it when a group's first CUDA tensor comes.

    Through torch's Python binding: the layout of ProcessGroupNCCL depends on macros of torch's own build.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("Backend", dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options))


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None) -> Tensor:
    """Returns an uninitialised CPU tensor in memory that all ranks of the node share. Does not communicate.

    Collectives of `group` read and write such tensors where they lie: an all-reduce then moves the fewest bytes there
    can be. For that the tensors of all ranks must be made here; a call with other tensors among them gives the same
    result, slower. Views work as well; copies (`clone`, `to`) are ordinary tensors. The memory lives as long as the
    tensor, also when the group is gone; freed memory is kept for the next tensors of the group.

    Args:
        size: the shape, as for torch.empty.
        dtype: default: torch's default dtype.
        group: whose ranks share the memory; default: the world.

    Raises:
        ValueError: no tensor can have that size, or there is no process group.
        DistBackendError: the pool has no room (`BackendOptions(pool_bytes=...)`).
        TypeError: the group's CPU backend is not zeropg.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    backend = _backend_of(group)
    numel = math.prod(shape)  # Size.numel() wraps around
    if numel > torch.iinfo(torch.int64).max:
        raise ValueError(f"[zeropg] empty: {tuple(shape)} has {numel} elements, more than a tensor can have.")
    return cast("Tensor", backend.allocate_tensor(numel, dtype=dtype, device=torch.device("cpu"))).view(shape)


def topology(group: ProcessGroup | None = None) -> Any:
    """Returns the `Topology` of `group` (default: the world): which ranks share a node and which nodes a rack, and what
    the links between nodes carry, as measured when the default group was made and as large all-reduces of `group` have
    shown since. Does not communicate.

    Raises TypeError when the group's CPU backend is not zeropg, ValueError when there is no process group.
    """
    return _backend_of(group).topology()


def stats(group: ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """Returns this rank's counters of `group` (default: the world), by operation. Does not communicate.

    Each operation on CPU tensors has `calls`, `direct_calls`, `bytes`, `seconds`, per peer `waiting_seconds`, and
    `stragglers`.

    direct_calls: how many of the collectives used all tensors where they lie: in shared memory (`zeropg.empty`), and in
      a large all-to-all also in the memory of other ranks.
    waiting_seconds: how long this rank waited while the peer had not arrived. It is sampled; a wait for several ranks
      counts for each of them. For messages it is the time in which a message from or to the peer was wanted and nothing
      moved.
    stragglers: the ranks for which this rank waited in more than a quarter of `seconds`, and more than twice as
      long as for the typical other peer; the slowest first.

    Where something has travelled encoded, `compression` says what that has saved and cost, over all models of the
    group that live: `calls`, `plain_bytes` and `encoded_bytes` (what this rank encoded itself, before and after),
    `encode_seconds`, `decode_seconds`, `wire_seconds` (the rest of the calls), `exposed_seconds` (in which models
    waited for their communication; None without models of fully_shard), and `residual_norms` by parameter: what
    error feedback still owes.

    Raises TypeError when the group's CPU backend is not zeropg, ValueError when there is no process group.
    """
    backend = _backend_of(group)
    counted: dict[str, dict[str, Any]] = dict(backend.stats())
    rank = dist.get_rank(group)
    operations = {
        name: {**of, "stragglers": _stragglers(of["waiting_seconds"], of["seconds"], rank)}
        for name, of in counted.items()
    }
    compression = coding_statistics(backend)
    return operations if compression is None else {**operations, "compression": compression}


def _stragglers(waits: Sequence[float], seconds: float, rank: int) -> list[int]:
    def stands_out(peer: int) -> bool:
        others = [wait for other, wait in enumerate(waits) if other not in (peer, rank)]
        return waits[peer] > max(seconds / 4, 2 * statistics.median(others) if others else 0)

    return sorted(filter(stands_out, range(len(waits))), key=lambda peer: -waits[peer])


def shrink_group(
    ranks_to_exclude: list[int], group: ProcessGroup | None = None, *, abort: bool = False
) -> ProcessGroup:
    """Returns a group of the ranks of `group` that are left, in their order, and destroys `group`.

    All ranks that stay must call, within the group's timeout. They may call after other ranks died; the waits of the
    operations that ran then raise those operations' errors. The store that the group was made with must still be there.

    Args:
        ranks_to_exclude: ranks in `group`, at least one and not all; the same on every rank that stays.
        group: default: the world; the result is then the new world, and all other groups are destroyed too.
        abort: True ends the operations that run on the group with an error; False waits for them.

    Raises:
        ValueError: the ranks are wrong.
        RuntimeError: this rank is excluded.
        TypeError: the CPU backend is not zeropg, or TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        DistBackendError: some ranks did not come; the message names them.
    """
    world = dist.distributed_c10d._world
    group = dist.distributed_c10d._get_default_group() if group is None else group
    _backend_of(group)
    devices, is_world = group._device_types, group is dist.group.WORLD
    excluded = set(ranks_to_exclude)
    members = [rank for place, rank in enumerate(dist.get_process_group_ranks(group)) if place not in excluded]
    flags = dist.distributed_c10d.SHRINK_ABORT if abort else dist.distributed_c10d.SHRINK_DEFAULT
    smaller = dist.distributed_c10d.shrink_group(ranks_to_exclude, group, flags)
    # torch registers what comes back as gloo's, for the CPU alone; its logger then takes it for a ProcessGroupGloo.
    backend = smaller._get_backend(torch.device("cpu"))
    for device in devices:
        smaller._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, backend)
    smaller._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    # It also takes ranks of the group for ranks of the world; a new world counts anew.
    world.pg_group_ranks[smaller] = {rank: i for i, rank in enumerate(range(len(members)) if is_world else members)}
    if _torch_records():
        config = dist.distributed_c10d.BackendConfig(dist.Backend("zeropg"))
        dist.distributed_c10d._maybe_attach_flight_recorder(smaller, config, list(world.pg_group_ranks[smaller]))
    return smaller


def _backend_of(group: ProcessGroup | None) -> Any:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("[zeropg] there is no process group; call torch.distributed.init_process_group first")
    backend = unwrapped_backend(group, torch.device("cpu"))
    if not isinstance(backend, _C.ProcessGroupZero):
        raise TypeError(f"[zeropg] the group's CPU backend is {backend.name()}, expected zeropg")
    return backend


def unwrapped_backend(group: ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for `device`'s tensors itself, also under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = group._get_backend(device)
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def group_like(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """Makes another group of the same ranks, in their order, and backends, with the timeout of `device`'s. Collective.

    Options go along where all of the group's backends are zeropg: torch would hand them to the others as well.
    """
    ranks = dist.get_process_group_ranks(group)
    if not _is_zeropg(group):
        return _new_group(ranks, group, device, broadcast_text(group, "fully_shard", _fresh_name()))
    name = broadcast_text(group, "fully_shard", f"{group.group_name}/gradients{_splits_of(group, device)}")
    return _split_off(group, list(range(len(ranks))), device, name, _timeout_of(group, device))


def group_across(shards: ProcessGroup, replicas: ProcessGroup, ranks: list[int], device: torch.device) -> ProcessGroup:
    """Makes a group of the `ranks` of a mesh, whose row and column on this rank are given. Only these ranks call."""
    world = dist.distributed_c10d._get_default_group()
    can_split = _is_zeropg(world) and _is_zeropg(shards)
    name = f"{world.group_name}/mesh{_splits_of(world, device)}from{ranks[0]}" if can_split else _fresh_name()
    name = broadcast_text(replicas, "fully_shard", broadcast_text(shards, "fully_shard", name))
    if not can_split:
        return _new_group(ranks, shards, device, name)
    return _split_off(world, ranks, device, name, _timeout_of(shards, device))


def _is_zeropg(group: ProcessGroup) -> bool:
    return all(isinstance(group._get_backend(one), _C.ProcessGroupZero) for one in group._device_types)


def _splits_of(group: ProcessGroup, device: torch.device) -> int:
    return int(cast("Any", group._get_backend(device)).comm_split_count())


def _fresh_name() -> str:
    """Of a group that this rank and others are about to make; the others' are not used."""
    return f"fully_shard {next(_made_groups)} of rank {dist.get_rank()}"


def _new_group(ranks: list[int], group: ProcessGroup, device: torch.device, name: str) -> ProcessGroup:
    """dist.new_group of `ranks`, which alone call, under a name that they have agreed upon.

    torch's own names count the groups that a rank has made or is in. That differs between ranks once some of them have
    made a group that the others have not, and then they wait for each other under different names.
    """
    timeout = _timeout_of(group, device)
    options = getattr(unwrapped_backend(group, device), "options", None)
    is_zeropg = all(isinstance(unwrapped_backend(group, one), _C.ProcessGroupZero) for one in group._device_types)
    arguments: dict[str, Any] = {"sort_ranks": False} if _keeps_order() else {}
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", lambda *_, **__: name):
        second = dist.new_group(
            ranks,
            timeout=timeout,
            backend=dist.get_backend_config(group),
            pg_options=options if is_zeropg else None,
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            **arguments,
        )
    return cast("ProcessGroup", second)  # this rank is a member


def _timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    return getattr(getattr(unwrapped_backend(group, device), "options", None), "_timeout", None)


def _keeps_order() -> bool:
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def _split_off(
    group: ProcessGroup, members: list[int], device: torch.device, name: str, timeout: timedelta | None
) -> ProcessGroup:
    """dist.split_group of `members`, which are ranks of `group`, under a name that they have agreed upon.

    torch's names count the groups that a rank has made. Other ranks make none here, and members may have made groups
    that others have not: they would wait for each other under different names, here or in the next new_group.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    ranks = [dist.get_global_rank(group, member) for member in members]
    second = cast("Any", group).split_group(members, timeout=timeout, group_name=name, group_desc="fully_shard")
    second.bound_device_id = group.bound_device_id
    # So that destroy_process_group and the flight recorder find it.
    configuration, tag = world.pg_backend_config[group], f"ptd:{name}"
    world.pg_map[second] = (world.pg_map[group][0], second.get_group_store())
    world.pg_names[second] = name
    world.pg_backend_config[second] = configuration
    world.pg_group_ranks[second] = {rank: i for i, rank in enumerate(ranks)}
    world.pg_to_tag[second] = tag
    world.tags_to_pg.setdefault(tag, []).append(second)
    c10d._register_process_group(name, second)
    backend = second._get_backend(device)
    if _torch_records():
        c10d._maybe_attach_flight_recorder(second, c10d.BackendConfig(c10d.Backend(configuration)), ranks)
    else:
        backend.start_recording()
    if get_debug_level() != DebugLevel.OFF:
        _say_what_was_made(backend, name)
    return cast("ProcessGroup", second)
