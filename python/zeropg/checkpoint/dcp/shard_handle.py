"""What DCP gets in place of a tensor: it asks a `ShardHandle` which boxes to write, which to read, and for each box.

Its planners know tensors that answer `__create_write_items__`, `__create_chunk_list__` and `__get_tensor_shard__`
(torch/distributed/checkpoint/planner_helpers.py); DTensor does so, too.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeropg.checkpoint.dcp.boxes import Box, boxes_of, covering_rows
from zeropg.sharding.state import ShardedState
from zeropg.tensor_parallel.pieces import Cut

Range = tuple[int, int]  # elements [start, stop) in C order


class Part:
    """This rank's elements of one tensor: those that it saves, and those that it loads, which it holds until `take`."""

    def __init__(
        self,
        name: str,
        cut: Cut,
        dtype: torch.dtype,
        *,
        saves: Range,
        loads: Range,
        read: Callable[[int, int], torch.Tensor],
        state: ShardedState | None = None,
    ) -> None:
        """
        name: for messages.
        cut: the part of the tensor of which it is elements.
        read: returns the values of elements [start, stop), flat; a live view or a copy.
        state: of the model; None for a copy, which nothing changes any more.
        """
        self.name = name
        self.shape = torch.Size(cut.shape)  # of the whole
        self._cut = cut
        self.dtype = dtype
        self._saves = saves
        self._loads = loads
        self._fills = covering_rows(cut.sizes, *loads) if loads[0] < loads[1] else loads  # what DCP is asked for
        self._read = read
        self._state = state
        self._steps_before = 0 if state is None else state.core.steps
        self._values: torch.Tensor | None = None  # what a load fills: [fills]
        self._filled = 0  # elements
        self._is_asked_for = False

    # --- what DCP asks ---

    def plan_save(self) -> list[Box]:
        if self._state is not None and self._state.core.steps != self._steps_before:
            # Values are live, numbers and param groups are of then.
            raise RuntimeError(
                f"[zeropg] '{self.name}': the optimizer has stepped since this state_dict() was made; make another one "
                "for each save"
            )
        self._values = None
        return self._boxes(*self._saves)

    def plan_load(self) -> list[Box]:
        start, stop = self._fills
        self._values = torch.empty(stop - start, dtype=self.dtype)
        self._filled = 0
        self._is_asked_for = False
        return self._boxes(start, stop)

    def find(self, offsets: Sequence[int]) -> torch.Tensor:
        """Returns the box at `offsets`: to be written to a file, or to be filled from one."""
        first, last = self._saves if self._values is None else self._fills
        box = next((each for each in self._boxes(first, last) if each.offsets == tuple(offsets)), None)
        if box is None:
            raise ValueError(f"[zeropg] '{self.name}': this rank has no part at {list(offsets)} of it")
        if self._values is None:
            return _tight(self._read(box.start, box.stop)).view(box.sizes)
        self._is_asked_for = True
        target = self._values[box.start - first : box.stop - first].view(box.sizes).as_subclass(_Target)
        target.part = self
        return target

    def note_copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Called for everything that is copied into a target. Raises ValueError for another kind of dtype."""
        if _kind(values.dtype) != _kind(self.dtype):
            raise ValueError(f"[zeropg] '{self.name}' is {values.dtype} in the checkpoint, here {self.dtype}")
        self._filled += target.numel()

    def _boxes(self, start: int, stop: int) -> list[Box]:
        """Elements [start, stop) of the part as boxes of the whole."""
        boxes = boxes_of(self._cut.sizes, start, stop)
        return [box._replace(offsets=tuple(map(operator.add, box.offsets, self._cut.offsets))) for box in boxes]

    # --- what a load asks ---

    @property
    def is_wanted(self) -> bool:
        """Whether this rank has something to load of it."""
        return self._loads[0] < self._loads[1]

    @property
    def is_read(self) -> bool:
        """Whether DCP has found it in the checkpoint. A reader that does not use `copy_` is trusted."""
        return self._values is not None and self._is_asked_for

    def check_whole(self) -> None:
        """Raises ValueError where the checkpoint held some of this rank's elements only."""
        wanted = self._fills[1] - self._fills[0]
        if self.is_read and 0 < self._filled < wanted:
            raise ValueError(
                f"the checkpoint holds {self._filled} of the {wanted} elements of '{self.name}' that this rank needs; "
                "its other parts are missing"
            )

    def loaded(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) as they were read."""
        assert self._values is not None
        return self._values[start - self._fills[0] : stop - self._fills[0]]

    @property
    def nbytes(self) -> int:
        """Of what was read."""
        return 0 if self._values is None else self._values.nbytes

    def has_same_values(self, other: Part) -> bool:
        """Whether the same bytes were read for both."""
        mine, theirs = self._values, other._values
        assert mine is not None and theirs is not None
        return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))

    def drop(self) -> None:
        """Frees what was read."""
        self._values = None
        self._is_asked_for = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        """Returns a copy on the CPU of what this rank saves, as it is now: what dcp.async_save stages."""
        if self._state is not None and self._state.parallel.everybody.size() > 1:
            _check_group_of_async_save(self._state)
        start, stop = self._saves
        values = self._read(start, stop).detach().to("cpu", copy=True) if start < stop else torch.empty(0)
        return Part(
            self.name,
            self._cut,
            self.dtype,
            saves=self._saves,
            loads=(0, 0),
            read=lambda first, last: values[first - start : last - start],
        )


class ShardHandle(torch.Tensor):
    """Stands for a whole tensor, with its shape and dtype but without values: for DCP only."""

    part: Part | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: Part) -> ShardHandle:
        handle: ShardHandle = _empty_handle(part.shape, part.dtype)
        handle.part = part
        return handle

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.new_empty.default:  # DCP's stager, which then copies the attributes
            return _empty_handle(args[1], args[0].dtype)
        name = next((arg.part.name for arg in args if isinstance(arg, ShardHandle) and arg.part is not None), "")
        raise RuntimeError(
            f"[zeropg] {func}: '{name}' is a handle for torch.distributed.checkpoint, which has no values; whole "
            "tensors come from zeropg.full_state_dict. (dcp.async_save takes handles with its default stager only.)"
        )

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        assert self.part is not None
        properties = TensorProperties(dtype=self.part.dtype)
        if _writes_safetensors():
            raise NotImplementedError(
                "[zeropg] dcp.save: a file of safetensors has room for one box of a tensor, and a rank's part of a "
                "sharded one may be several; use DCP's own format, or zeropg.save_16bit_weights"
            )
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.part.shape),
            )
            for index, chunk in enumerate(map(_chunk, self.part.plan_save()))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        assert self.part is not None
        return [_chunk(box) for box in self.part.plan_load()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert self.part is not None and index.offset is not None
        return self.part.find(index.offset)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardHandle({list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "[zeropg] a handle for torch.distributed.checkpoint cannot be pickled or sent to another process; use "
            "dcp.save, or dcp.async_save with threads"
        )


class _Target(torch.Tensor):
    """A tensor that a load fills; tells its part what was copied into it, or into a part of it."""

    part: Part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if isinstance(target, _Target) and func is torch.Tensor.copy_:
            target.part.note_copy(args[1], target)
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(target, _Target) and isinstance(result, _Target):
            result.part = target.part
        return result


def part_of(name: str, value: Any) -> Part:
    """Returns what a handle stands for. Raises TypeError for anything else."""
    if not isinstance(value, ShardHandle) or value.part is None:
        raise TypeError(
            f"'{name}' is a {type(value).__name__}, expected what state_dict() of the same object returned; for whole "
            "tensors use zeropg.load_full_state_dict"
        )
    return value.part


def _empty_handle(shape: Sequence[int], dtype: torch.dtype) -> Any:
    handle = torch.Tensor._make_wrapper_subclass(ShardHandle, tuple(shape), dtype=dtype, device=torch.device("cpu"))
    handle.part = None
    return handle


def _writes_safetensors() -> bool:
    """Whether the dcp.save that plans now has a writer that keeps the last box of each tensor, without a word."""
    writer = (_locals_of_caller("storage_writer") or {}).get("storage_writer")
    return getattr(getattr(writer, "serialization_format", None), "name", "") == "SAFETENSORS"


def _check_group_of_async_save(state: ShardedState) -> None:
    """Raises RuntimeError where dcp.async_save is to save over the model's own group: collectives are matched by their
    order, and its thread would start them between those of the training."""
    arguments = _locals_of_caller("async_checkpointer_type")
    groups = (state.core.process_group, state.parallel.everybody)
    if arguments is not None and (arguments.get("process_group") or dist.group.WORLD) in groups:
        raise RuntimeError(
            "[zeropg] dcp.async_save: it would communicate in a thread, over the group that the model trains with; "
            "make another with dist.new_group(), once, and pass it as process_group"
        )


def _locals_of_caller(name: str) -> dict[str, Any] | None:
    """Returns the variables of the next function up the stack that has one called so: of DCP's, which says no more."""
    frame = sys._getframe()
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _tight(values: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor whose storage is no larger: DCP's writer copies others and keeps the copies.

    values: flat; of another device it is returned as it is.
    """
    values = values.detach()
    if values.device.type != "cpu" or values.untyped_storage().nbytes() == values.nbytes:
        return values
    return torch.from_numpy(values.contiguous().view(torch.uint8).numpy()).view(values.dtype)
