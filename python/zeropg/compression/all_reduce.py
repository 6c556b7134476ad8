"""A compressed all-reduce for users' own loops."""

from typing import Any

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.compression.codec import Codec, check_codec
from zeropg.compression.state import State, backend_of


def all_reduce(
    tensor: torch.Tensor,
    codec: Codec | None,
    *,
    state: State | None = None,
    group: dist.ProcessGroup | None = None,
    op: Any = dist.ReduceOp.SUM,
    name: str | None = None,
    async_op: bool = False,
) -> Any:
    """Sums `tensor` over the ranks in place, its bytes encoded by `codec`. Collective; all ranks get the same bits.

    tensor: fp32, fp16 or bf16 on the CPU, any shape; 16-bit tensors are summed in fp32 and rounded once.
    codec: the same on every rank, e.g. TopK(0.01). With State("auto") the state's: tensors for which it has chosen
      nothing travel as they are.
    state: `State(codec)` for error feedback: what this call loses is added to the next one of the same name. Without
      one it is lost.
    group: of zeropg; default: that of `state`, else the world.
    op: SUM or AVG.
    name: whose residuals these are. Default: the name of the parameter whose `.grad` the tensor is, where the state
      knows the model; else "tensor of SHAPE", which serves one tensor of each shape. Give names where tensors of one
      shape are made anew in each step: one that is gone cannot be told from the next. A name has the same number of
      elements in every call.
    async_op: return a Work at once instead of waiting. The tensor belongs to the operation until it is complete.

    Returns `tensor`, or the Work. Raises TypeError for something that is no codec and for tensors that cannot be
    encoded, ValueError for other operations, for groups of another backend, for two tensors of one shape in turn
    without names, and for a name that had another number of elements; DistBackendError on every rank where ranks make
    different calls.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"[zeropg] compression.all_reduce: got a {type(tensor).__name__}, expected a tensor.")
    if state is not None and not isinstance(state, State):
        raise TypeError(f"[zeropg] compression.all_reduce: state is {state!r}, expected State({codec!r}) or None.")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"[zeropg] compression.all_reduce: name is {name!r}, expected a text or None.")
    if not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        raise TypeError(f"[zeropg] compression.all_reduce: op is {op!r}, expected dist.ReduceOp.SUM or AVG.")
    if state is None or not state.is_auto:  # what "auto" has chosen may be None: as it is
        check_codec(codec, "compression.all_reduce")
    if state is None:
        assert codec is not None
        backend = backend_of(group, "compression.all_reduce")
        work = _C.compressed_all_reduce(backend, tensor, codec.make_compressor(), None, [], op, async_op=async_op)
    else:
        state.check_serves(codec, group)
        ranges = [(state.name_of(tensor, name), 0, tensor.numel())]
        work = state.reduce_ranges(tensor, ranges, op, async_op=async_op)
    return work if async_op else tensor
