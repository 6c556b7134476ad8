"""The operations that `bench collectives` knows: how to call each, what must come out, and how its bytes count.

An operation's result is computed here from the formula of the inputs, without any process group, so that a fault of a
backend cannot hide in the reference. Inputs are small whole numbers, so that every sum and product is exact in every
dtype and a single wrong element counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # not in torch.distributed

# nccl-tests' names, which its parsers know; int16 and bool are not NCCL's.
DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "bool": torch.bool,
}
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
# torch's ProcessGroup, or what has its methods. They are what DDP calls, without torch.distributed's own 20 us a call.
Group = Any
Empty = Callable[[int, torch.dtype], Tensor]  # a new tensor of so many elements, where a peer wants it


@dataclass(frozen=True)
class Shape:
    """One point of a table. `count` as nccl-tests counts: elements of one block, of the whole where there are none."""

    count: int
    dtype: torch.dtype
    redop: str
    rank: int
    world_size: int
    root: int = 0


@dataclass
class Buffers:
    """`call(group)` on a rank's tensors, and what `outputs` must hold after it (None: nothing on this rank).

    `fill` sets all tensors to what they were before the first call.
    """

    outputs: list[Tensor]
    expected: list[Tensor] | None
    call: Callable[[Group], None]
    fill: Callable[[], None]

    def wrong(self) -> int:
        """Elements of the outputs that are not what they must be."""
        if self.expected is None:
            return 0
        pairs = zip(self.outputs, self.expected, strict=True)
        return sum(int((output != expected).sum()) for output, expected in pairs)


@dataclass(frozen=True)
class Case:
    """One operation.

    blocks: whether the size column is world_size blocks of `count` elements (else one).
    bus_factor: busbw / algbw of n ranks, nccl-tests' doc/PERFORMANCE.md.
    least_bytes, staged_bytes: bytes read and written in memory per rank and byte of the size column: the lower bound
        (each input read once, each output written once, tensors in shared memory), and with staging, by the costs in
        backend/collectives/README.md; the mean over ranks, since they share the memory.
    least_bytes_in_place: where it is less than least_bytes, since a block is in its place already.
    in_place: which of out-of-place and in-place c10d has.
    """

    name: str
    make: Callable[[Shape, bool, Empty], Buffers]
    bus_factor: Callable[[int], float]
    least_bytes: Callable[[int], float]
    staged_bytes: Callable[[int], float]
    blocks: bool = False
    reduces: bool = False
    least_bytes_in_place: Callable[[int], float] | None = None
    rooted: bool = False
    in_place: Sequence[bool] = (True,)

    def bytes_of(self, shape: Shape) -> int:
        """The size column."""
        return shape.count * shape.dtype.itemsize * (shape.world_size if self.blocks else 1)


def pattern(shape: Shape, rank: int, start: int, count: int) -> Tensor:
    """`count` elements from index `start` of what `rank` contributes."""
    index = torch.arange(start, start + count)
    if shape.redop == "sum":
        values = (index + 3 * rank) % 4
    elif shape.redop == "avg":
        values = shape.world_size * ((index + rank) % 2)
    elif shape.redop == "prod":  # a single factor of 2, so that int8 holds the product
        values = 1 + ((index % (2 * shape.world_size)) == rank).long()
    else:
        values = (31 * index + 17 * rank) % 127
    return (values % 2 if shape.dtype == torch.bool else values).to(shape.dtype)


def reduced(shape: Shape, start: int, count: int) -> Tensor:
    """What all ranks' patterns reduce to."""
    total = pattern(shape, 0, start, count).to(torch.float64)
    for rank in range(1, shape.world_size):
        other = pattern(shape, rank, start, count).to(torch.float64)
        if shape.redop in ("sum", "avg"):
            total += other
        elif shape.redop == "prod":
            total *= other
        else:
            total = torch.maximum(total, other) if shape.redop == "max" else torch.minimum(total, other)
    if shape.redop == "avg":
        total /= shape.world_size
    return total.to(shape.dtype)  # bool: anything but zero is true


def empty_on_heap(count: int, dtype: torch.dtype) -> Tensor:
    """An ordinary tensor."""
    return torch.empty(count, dtype=dtype)


def _holding(values: Tensor, empty: Empty) -> Tensor:
    tensor = empty(values.numel(), values.dtype)
    tensor.copy_(values)
    return tensor


def _one_tensor(shape: Shape, expected: Tensor | None, empty: Empty, call: Callable[[Group, Tensor], Any]) -> Buffers:
    """In place: the tensor that goes in comes out."""
    mine = pattern(shape, shape.rank, 0, shape.count)
    tensor = _holding(mine, empty)

    def fill() -> None:
        tensor.copy_(mine)

    return Buffers([tensor], None if expected is None else [expected], lambda group: call(group, tensor), fill)


def _two_tensors(source: Tensor, output: Tensor, expected: Tensor | None, call: Callable[[Group], Any]) -> Buffers:
    """`source` may be a part of `output`, or the other way round: then filling has to restore it."""
    original = source.clone()

    def fill() -> None:
        output.zero_()
        source.copy_(original)

    return Buffers([output], None if expected is None else [expected], call, fill)


def _all_reduce(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = REDUCTIONS[shape.redop], False
    expected = reduced(shape, 0, shape.count)
    return _one_tensor(shape, expected, empty, lambda group, tensor: _finish(group.allreduce([tensor], options)))


def _dist_all_reduce(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    def call(group: Group, tensor: Tensor) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise NotImplementedError("torch.distributed's functions take ProcessGroups")
        dist.all_reduce(tensor, op=REDUCTIONS[shape.redop], group=group)

    return _one_tensor(shape, reduced(shape, 0, shape.count), empty, call)


def _reduce(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank, options.asyncOp = REDUCTIONS[shape.redop], shape.root, False
    expected = reduced(shape, 0, shape.count) if shape.rank == shape.root else None
    return _one_tensor(shape, expected, empty, lambda group, tensor: _finish(group.reduce([tensor], options)))


def _broadcast(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = shape.root, False
    expected = pattern(shape, shape.root, 0, shape.count)
    return _one_tensor(shape, expected, empty, lambda group, tensor: _finish(group.broadcast([tensor], options)))


def _all_gather(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    n, count = shape.world_size, shape.count
    options = AllgatherOptions()
    options.asyncOp = False
    output = empty(n * count, shape.dtype)
    mine = pattern(shape, shape.rank, 0, count)
    source = output.narrow(0, shape.rank * count, count) if in_place else empty(count, shape.dtype)
    source.copy_(mine)
    expected = torch.cat([pattern(shape, rank, 0, count) for rank in range(n)])
    return _two_tensors(source, output, expected, lambda group: _finish(group._allgather_base(output, source, options)))


def _reduce_scatter(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    n, count = shape.world_size, shape.count
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = REDUCTIONS[shape.redop], False
    source = _holding(pattern(shape, shape.rank, 0, n * count), empty)
    output = source.narrow(0, shape.rank * count, count) if in_place else empty(count, shape.dtype)
    expected = reduced(shape, shape.rank * count, count)
    return _two_tensors(
        source, output, expected, lambda group: _finish(group._reduce_scatter_base(output, source, options))
    )


def _gather(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.GatherOptions()
    options.rootRank, options.asyncOp = shape.root, False
    source = _holding(pattern(shape, shape.rank, 0, shape.count), empty)
    is_root = shape.rank == shape.root
    outputs = [empty(shape.count, shape.dtype) for _ in range(shape.world_size if is_root else 0)]
    expected = [pattern(shape, rank, 0, shape.count) for rank in range(shape.world_size)] if is_root else None

    def fill() -> None:
        for output in outputs:
            output.zero_()

    lists = [outputs] if is_root else []
    return Buffers(outputs, expected, lambda group: _finish(group.gather(lists, [source], options)), fill)


def _scatter(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.ScatterOptions()
    options.rootRank, options.asyncOp = shape.root, False
    n, count = shape.world_size, shape.count
    blocks = [pattern(shape, shape.root, rank * count, count) for rank in range(n)]
    output = empty(count, shape.dtype)
    sources = [[_holding(block, empty) for block in blocks]] if shape.rank == shape.root else []

    def fill() -> None:
        output.zero_()

    return Buffers(
        [output], [blocks[shape.rank]], lambda group: _finish(group.scatter([output], sources, options)), fill
    )


def _all_to_all(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.AllToAllOptions()
    options.asyncOp = False
    n, count = shape.world_size, shape.count
    source = _holding(pattern(shape, shape.rank, 0, n * count), empty)
    output = empty(n * count, shape.dtype)
    expected = torch.cat([pattern(shape, rank, shape.rank * count, count) for rank in range(n)])
    return _two_tensors(
        source, output, expected, lambda group: _finish(group.alltoall_base(output, source, [], [], options))
    )


def _send_receive(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    n = shape.world_size
    following, preceding = (shape.rank + 1) % n, (shape.rank - 1) % n
    source = _holding(pattern(shape, shape.rank, 0, shape.count), empty)
    output = empty(shape.count, shape.dtype)

    def call(group: Group) -> None:
        works = [group.send([source], following, 0), group.recv([output], preceding, 0)]
        for work in works:
            work.wait()

    return _two_tensors(source, output, pattern(shape, preceding, 0, shape.count), call)


def _barrier(shape: Shape, in_place: bool, empty: Empty) -> Buffers:
    options = dist.BarrierOptions()
    options.asyncOp = False
    return Buffers([], None, lambda group: _finish(group.barrier(options)), lambda: None)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _both(n: int) -> float:
    return 2 * (n - 1) / n


def _one_way(n: int) -> float:
    return (n - 1) / n


CASES = {
    case.name: case
    for case in (
        Case("all_reduce", _all_reduce, _both, lambda n: 2, lambda n: 5 - 1 / n, reduces=True),
        Case("dist_all_reduce", _dist_all_reduce, _both, lambda n: 2, lambda n: 5 - 1 / n, reduces=True),
        Case("reduce", _reduce, lambda n: 1, lambda n: 1 + 1 / n, lambda n: 3 - 1 / n, reduces=True, rooted=True),
        Case("broadcast", _broadcast, lambda n: 1, lambda n: 1, lambda n: 2, rooted=True),
        Case(
            "all_gather",
            _all_gather,
            _one_way,
            lambda n: 1 + 1 / n,
            lambda n: 2 * (1 + 1 / n),
            blocks=True,
            least_bytes_in_place=lambda n: 1,
            in_place=(False, True),
        ),
        Case(
            "reduce_scatter",
            _reduce_scatter,
            _one_way,
            lambda n: 1 + 1 / n,
            lambda n: 3 - 1 / n,
            blocks=True,
            reduces=True,
            in_place=(False, True),
        ),
        Case(
            "gather", _gather, _one_way, lambda n: 2 / n, lambda n: 4 / n, blocks=True, rooted=True, in_place=(False,)
        ),
        Case(
            "scatter", _scatter, _one_way, lambda n: 2 / n, lambda n: 4 / n, blocks=True, rooted=True, in_place=(False,)
        ),
        Case("all_to_all", _all_to_all, _one_way, lambda n: 2, lambda n: 4 - 2 / n, blocks=True, in_place=(False,)),
        Case("send_receive", _send_receive, lambda n: 1, lambda n: 2, lambda n: 4, in_place=(False,)),
        Case("barrier", _barrier, lambda n: 0, lambda n: 0, lambda n: 0, in_place=(False,)),
    )
}
