"""The buffers of a model that is being sharded."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import nn

from zeropg.rank_io.broadcast import broadcast_values
from zeropg.sharding.units import UnitPlan
from zeropg.tensor_parallel.distributed import is_distributed, local_of

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|type \(")  # torch's words where it does not mix two of them
_LISTED = 5  # names in a note


def prepare_buffers(
    module: nn.Module, buffer_dtype: torch.dtype | None, group: dist.ProcessGroup, everybody: dist.ProcessGroup
) -> None:
    """Casts floating buffers and gives all the values of rank 0 of `everybody`; one with several names stays one.

    group: the ranks that have the same parts of DTensors, over which those go.
    """
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the old one is kept, so that its id is not used again
    for child in module.modules():
        for key, buffer in child._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in done:
                dtype = buffer_dtype if buffer_dtype is not None and buffer.is_floating_point() else buffer.dtype
                prepared = buffer.to(dtype)
                if is_distributed(prepared):
                    if group.size() > 1:
                        broadcast_values(local_of(prepared), group)
                elif everybody.size() > 1 and prepared.layout != torch.strided:  # a sparse one: a graph's edges
                    from_rank_0 = [prepared]
                    dist.broadcast_object_list(from_rank_0, group=everybody, group_src=0)
                    prepared = from_rank_0[0].to(prepared.device)
                elif everybody.size() > 1:
                    prepared = prepared.contiguous()  # itself, but for a transposed or expanded one
                    broadcast_values(prepared, everybody)
                done[id(buffer)] = (buffer, prepared)
            child._buffers[key] = done[id(buffer)][1]


def explain_other_dtypes(error: BaseException, unit: UnitPlan, param_dtype: torch.dtype | None) -> None:
    """Adds a note to what the forward of a unit has raised, where it may be of buffers that param_dtype left alone."""
    if param_dtype is None or not isinstance(error, RuntimeError) or not _ABOUT_DTYPES.search(str(error)):
        return
    buffers = unit.module.named_buffers(prefix=unit.name)
    others = [name for name, buffer in buffers if buffer.is_floating_point() and buffer.dtype != param_dtype]
    if others and not getattr(error, "__notes__", None):  # of an inner unit
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        error.add_note(
            f"[zeropg] forward: parameters and inputs are {param_dtype} (param_dtype=), the buffers "
            f"{', '.join(map(repr, others[:_LISTED]))}{more} are not. If the two have met here, pass "
            f"buffer_dtype={param_dtype} to fully_shard (in DeepSpeed's configuration: data_types.buffer_dtype), which "
            "casts floating buffers, or cast where forward uses them."
        )
