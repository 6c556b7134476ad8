"""Open MPI as a contestant: the methods of a ProcessGroup that the cases call, by MPI. Ranks are started by mpirun.

Collectives are MPI's blocking ones, which is how MPI programs call them; bytes are moved as bytes, and reductions take
the dtypes that MPI has. What it lacks raises NotImplementedError.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class MpiGroup:
    """All ranks of MPI's world. Raises RuntimeError where mpi4py is not installed or mpirun did not start the ranks."""

    def __init__(self) -> None:
        try:
            self._mpi: Any = importlib.import_module("mpi4py.MPI")
        except ImportError as error:
            raise RuntimeError(f"openmpi: {error}; install requirements/bench.txt") from error
        mpi = self._mpi
        self._world = mpi.COMM_WORLD
        if (self._world.Get_rank(), self._world.Get_size()) != (dist.get_rank(), dist.get_world_size()):
            raise RuntimeError(
                f"openmpi: this is rank {dist.get_rank()} of {dist.get_world_size()} to torch and "
                f"{self._world.Get_rank()} of {self._world.Get_size()} to MPI; start the ranks with mpirun"
            )
        self.version = str(mpi.Get_library_version()).split(",")[0]
        self._types = {
            torch.int8: mpi.INT8_T,
            torch.uint8: mpi.UINT8_T,
            torch.int16: mpi.INT16_T,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
            torch.float32: mpi.FLOAT,
            torch.float64: mpi.DOUBLE,
        }
        self._ops = {
            dist.ReduceOp.SUM: mpi.SUM,
            dist.ReduceOp.PRODUCT: mpi.PROD,
            dist.ReduceOp.MAX: mpi.MAX,
            dist.ReduceOp.MIN: mpi.MIN,
        }

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, self._numbers(tensors[0]), self._op(options))

    def reduce(self, tensors: list[Tensor], options: Any) -> None:
        numbers, op, root = self._numbers(tensors[0]), self._op(options), options.rootRank
        if self._world.rank == root:
            self._world.Reduce(self._mpi.IN_PLACE, numbers, op, root)
        else:
            self._world.Reduce(numbers, None, op, root)

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        self._world.Bcast(self._bytes(tensors[0]), options.rootRank)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any) -> None:
        is_in_place = _lies_in(source, output)
        self._world.Allgather(self._mpi.IN_PLACE if is_in_place else self._bytes(source), self._bytes(output))

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> None:
        if _lies_in(output, source):  # MPI would put the block at the start
            raise NotImplementedError("reduce_scatter in place, block by block")
        self._world.Reduce_scatter_block(self._numbers(source), self._numbers(output), self._op(options))

    def gather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any) -> None:
        raise NotImplementedError("gather into a list of tensors")

    def scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], options: Any) -> None:
        raise NotImplementedError("scatter from a list of tensors")

    def alltoall_base(self, output: Tensor, source: Tensor, to: list[int], from_: list[int], options: Any) -> None:
        self._world.Alltoall(self._bytes(source), self._bytes(output))

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Request:
        return _Request(self._world.Isend(self._bytes(tensors[0]), rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Request:
        return _Request(self._world.Irecv(self._bytes(tensors[0]), rank, tag))

    def barrier(self, options: Any) -> None:
        self._world.Barrier()

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [self._memory(tensor), self._mpi.BYTE]

    def _numbers(self, tensor: Tensor) -> list[Any]:
        if tensor.dtype not in self._types:
            raise NotImplementedError(f"reductions of {tensor.dtype}")
        return [self._memory(tensor), self._types[tensor.dtype]]

    def _memory(self, tensor: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _op(self, options: Any) -> Any:
        for ours, theirs in self._ops.items():
            if options.reduceOp == ours:
                return theirs
        raise NotImplementedError(f"{options.reduceOp}")


class _Request:
    """MPI's request with the face of c10d's work."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes
