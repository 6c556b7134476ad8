"""Makes process groups for torch.distributed and answers questions about them."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zeropg._native import _C

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store
    from torch.distributed import ProcessGroup

BackendOptions: Any = _C.BackendOptions
Topology: Any = _C.Topology

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
        raise NotImplementedError(
            "[zeropg] enable_reconfigure: groups keep their ranks; make a new group, or restart from a checkpoint "
            "after a rank died"
        )
    options._timeout = given.timeout
    options.group_name = given.group_id
    options.global_ranks_in_group = given.global_ranks_in_group
    make_cuda_backend = _make_nccl if torch.cuda.is_available() else None
    backend = _C.ProcessGroupZero(given.store, given.group_rank, given.group_size, options, make_cuda_backend)
    return cast("Backend", backend)


def _make_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Makes NCCL's process group; the core calls it when a group's first CUDA tensor comes.

    Through torch's Python binding: the layout of ProcessGroupNCCL depends on macros of torch's own build.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("Backend", dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options))


def topology(group: ProcessGroup | None = None) -> Any:
    """Returns the `Topology` of `group` (default: the world): which ranks share a node. No communication.

    Raises TypeError when the group's CPU backend is not zeropg.
    """
    return _backend_of(group).topology()


def stats(group: ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """Returns this rank's counters of `group` per operation: calls, bytes, seconds, and waiting_seconds per peer.

    `waiting_seconds[peer]` sums the time in which this rank waited and `peer` had not arrived; it is sampled, and
    counts a wait for several ranks for each of them. CPU operations only. No communication.
    """
    return dict(_backend_of(group).stats())


def _backend_of(group: ProcessGroup | None) -> Any:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("[zeropg] there is no process group; call torch.distributed.init_process_group first")
    backend = group._get_backend(torch.device("cpu"))
    while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    if not isinstance(backend, _C.ProcessGroupZero):
        raise TypeError(f"[zeropg] the group's CPU backend is {backend.name()}, expected zeropg")
    return backend
