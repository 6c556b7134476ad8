"""Where the inputs of a checkpointed block wait for its backward."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Restore = Callable[[], torch.Tensor]


class Place(ABC):
    """Takes a floating tensor that needs a gradient, and gives the function that returns its values.

    Values come back in the tensor's dtype and shape and on its device, as often as they are asked for, without a graph.
    What they take is free when that function is.
    """

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> Restore: ...

    def __deepcopy__(self, memo: Any) -> Place:
        return self  # blocks and their copies share it


class Here(Place):
    """The tensor itself, which nobody may write to meanwhile."""

    def keep(self, tensor: torch.Tensor) -> Restore:
        version = version_of(tensor)
        kept = tensor.detach()

        def restore() -> torch.Tensor:
            check_unwritten(kept, version)
            return kept

        return restore


class HostMemory(Place):
    """A copy in host memory; a tensor that is there already stays itself."""

    def __init__(self) -> None:
        self._here = Here()

    def keep(self, tensor: torch.Tensor) -> Restore:
        if tensor.device.type == "cpu":
            return self._here.keep(tensor)
        device, kept = tensor.device, tensor.detach().cpu()
        return lambda: kept.to(device)


class File(Place):
    """A file without a name, mode 0600, in a directory: it is gone when the process ends, however it ends."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fsdecode(directory)
        if not os.path.isdir(self._directory):
            raise ValueError(
                f"[zeropg] checkpoint_activations: to is {self._directory!r}; expected 'recompute', 'cpu', 'partition' "
                "or an existing directory on a local disk"
            )
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  # as long as blocks
        except OSError as error:
            raise OSError(
                error.errno, f"[zeropg] checkpoint_activations: cannot make a file in '{self._directory}': {error}"
            ) from error
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets, by bytes

    def keep(self, tensor: torch.Tensor) -> Restore:
        values = tensor.detach().cpu().contiguous()
        count = values.nbytes
        room = _room_for(count)
        free = self._free.setdefault(room, [])
        offset = free.pop() if free else self._end
        self._end = max(self._end, offset + room)
        try:
            data = values.view(-1).view(torch.uint8).numpy().data
            done = 0
            while done < count:
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        except OSError as error:
            free.append(offset)
            raise OSError(
                error.errno,
                f"[zeropg] checkpoint_activations: cannot write {count} bytes of activations to '{self._directory}': "
                f"{error.strerror}; make room there, or choose another place",
            ) from error
        device, shape, dtype = tensor.device, tensor.shape, tensor.dtype

        def restore() -> torch.Tensor:
            back = torch.empty(count, dtype=torch.uint8)
            view = back.numpy().data
            done = 0
            while done < count:
                moved = os.preadv(self._file.fileno(), [view[done:]], offset + done)
                if moved == 0:
                    raise OSError(f"[zeropg] checkpoint_activations: the file in '{self._directory}' has become short")
                done += moved
            return back.view(dtype).view(shape).to(device)

        weakref.finalize(restore, free.append, offset)
        return restore


class Partition(Place):
    """A part on each rank of a group whose ranks have the same tensor; all of them must keep and restore it.

    Where ranks turn out to have different ones, as in data parallelism, each keeps its own whole: said once.
    """

    def __init__(self, group: dist.ProcessGroup | None, parts: Place | None = None) -> None:
        """parts: where the part of this rank waits; default: where it is."""
        self._group = group
        self._here = parts or Here()
        self._is_same = True

    def keep(self, tensor: torch.Tensor) -> Restore:
        group = self._group or dist.distributed_c10d._get_default_group()
        size, rank = group.size(), group.rank()
        if size == 1 or not self._is_same or not self._check(tensor, group) or tensor.numel() == 0:
            return self._here.keep(tensor)
        flat = tensor.detach().reshape(-1)
        part = -(-flat.numel() // size)
        mine = flat.new_zeros(part)
        own = flat[rank * part : (rank + 1) * part]
        mine[: own.numel()] = own
        shape, kept = tensor.shape, self._here.keep(mine)

        def restore() -> torch.Tensor:
            own = kept()
            whole = own.new_empty(size * part)
            dist.all_gather_into_tensor(whole.view(torch.uint8), own.view(torch.uint8), group=group)
            return whole[: shape.numel()].view(shape)

        return restore

    def _check(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Whether all ranks have the same values: by their shape and a digest of their bits. Collective."""
        bits = _digest(tensor)
        mine = torch.stack([bits, bits.new_tensor(hash(tuple(tensor.shape)))])
        everybodys = mine.new_empty(group.size() * 2)
        dist.all_gather_into_tensor(everybodys, mine, group=group)
        self._is_same = bool((everybodys.view(-1, 2) == mine).all())
        if not self._is_same and group.rank() == 0:
            logging.getLogger("zeropg").warning(
                "checkpoint_activations(to='partition'): ranks have different activations, as in data parallelism, so "
                "each keeps its own whole. Name those that have the same ones in group=, such as a tensor-parallel "
                "group.",
            )
        return self._is_same


_DIGEST_ELEMENTS = 1 << 20  # at a time, which bounds what it takes


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of the bits, weighted by their places: the same samples in another order have another one. int64 []."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.detach().contiguous().view(-1).view(width)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), _DIGEST_ELEMENTS):
        part = bits[begin : begin + _DIGEST_ELEMENTS].long()
        places = torch.arange(begin, begin + part.numel(), device=tensor.device)
        total += (part * (places * 0x9E3779B97F4A7C1 + 1)).sum()
    return total


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor was written to; None for one of inference mode, which nobody counts."""
    return None if tensor.is_inference() else tensor._version


def check_unwritten(tensor: torch.Tensor, version: int | None) -> None:
    """Raises RuntimeError where somebody has written to an input since the block ran, which its backward needs."""
    if version_of(tensor) != version:
        raise RuntimeError(
            f"[zeropg] checkpoint_activations: an input of shape {list(tensor.shape)} was changed in place after its "
            "block had run, so the block cannot be run again for its backward; change a copy (x = x + y, not x += y)"
        )


def _room_for(count: int) -> int:
    """At most an eighth more than `count` bytes: of few sizes, so that space serves tensors of other lengths again."""
    step = max(4096, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step
