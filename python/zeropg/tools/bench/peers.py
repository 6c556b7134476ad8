"""The contestants of `bench collectives`: a group each, and where its tensors live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zeropg.tools.bench.cases import Empty, Group, empty_on_heap

# name: the backend of its group; "" for the one that is no backend of torch's
BACKENDS = {"zeropg": "zeropg", "zeropg_arena": "zeropg", "gloo": "gloo", "openmpi": ""}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Peer:
    """`group` runs the operations; `empty` makes the tensors that they are called with."""

    group: Group
    empty: Empty


def open_peers(names: Sequence[str], timeout: timedelta) -> dict[str, Peer]:
    """A new group per name; every rank calls it. Raises RuntimeError, saying what is missing, where one cannot run."""
    return {name: _open(name, timeout) for name in names}


def _open(name: str, timeout: timedelta) -> Peer:
    if not BACKENDS[name]:
        from zeropg.tools.bench.mpi_group import MpiGroup

        return Peer(MpiGroup(), empty_on_heap)
    group = dist.new_group(backend=BACKENDS[name], timeout=timeout)
    return Peer(group, _allocator(group) if name == "zeropg_arena" else empty_on_heap)


def _allocator(group: Group) -> Empty:
    """Tensors in the memory that the ranks of a node share."""
    backend = group._get_backend(_CPU)
    if not backend.supports_tensor_alloc(_CPU):
        raise RuntimeError("zeropg_arena: this build of zeropg has no tensors in shared memory for its groups")

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = backend.allocate_tensor(count, dtype=dtype, device=_CPU)
        return tensor

    return empty
