"""What the last operations of this process were, in the form that torch's analyzer reads (`torchfrtrace FOLDER`).

torch 2.15 records the operations of every backend through hooks. torch 2.11 records only NCCL's, so there the groups
record their own (`backend/process_group/flight_recorder.h`) and this module writes them down as NCCL's.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zeropg.backend import _backend_of, _torch_records

# Of our operations to those that torch 2.11's analyzer knows; what is not named is a barrier to it.
_NCCL_NAMES = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "compressed_all_reduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "_all_gather_base",
    "all_gather_coalesced": "ALLGATHER_coalesced",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "compressed_reduce_scatter": "_reduce_scatter_base",
    "gather": "gather",
    "gather_into_tensor": "gather",
    "scatter": "scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
}


def dump_flight_recorder(path: str | os.PathLike[str] | None = None) -> str:
    """Writes this rank's last operations on zeropg groups into a file and returns its path. Does not communicate.

    path: the file, which is replaced. Default: the name in TORCH_FR_DUMP_TEMP_FILE, else `zeropg_trace_rank_` in the
      folder for temporary files, followed by the rank: torch's analyzer wants the rank at the end of each name.

    Raises ValueError without a default process group, OSError when the file cannot be written.
    """
    if not dist.is_initialized():
        raise ValueError("[zeropg] there is no process group; call torch.distributed.init_process_group first")
    if path is None:
        default = os.path.join(tempfile.gettempdir(), "zeropg_trace_rank_")
        path = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", default) + str(dist.get_rank())
    if _torch_records():
        trace = c10d._dump_fr_trace(
            includeCollectives=True, includeStackTraces=True, onlyActive=False, backend="zeropg"
        )
    else:
        trace = pickle.dumps(own_trace())
    part = f"{os.fspath(path)}.{os.getpid()}.part"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(trace)
    os.replace(part, path)
    return os.fspath(path)


def own_trace() -> dict[str, Any]:
    """What the groups recorded themselves, in the layout of torch 2.11's flight recorder."""
    world = dist.distributed_c10d._world
    groups: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    for number, group in enumerate(world.pg_map):
        try:
            operations = _backend_of(group).recorded_operations()
        except (TypeError, RuntimeError):  # another backend's
            continue
        name, description = group.group_name, group.group_desc
        ranks = list(world.pg_group_ranks[group])
        groups[name] = {"name": name, "desc": description, "ranks": str(ranks)}
        entries += [_entry(operation, number, (name, description)) for operation in operations]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for record, entry in enumerate(entries):
        entry["record_id"] = record
    return {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}


def _entry(operation: dict[str, Any], number: int, group: tuple[str, str]) -> dict[str, Any]:
    is_message, is_complete = operation["is_message"], operation["completed_ns"] != 0
    name = operation["name"] if is_message else _NCCL_NAMES.get(operation["name"], "all_reduce_barrier")
    return {
        "frames": [],
        "pg_id": number,
        "process_group": group,
        "collective_seq_id": 0 if is_message else operation["sequence"],
        "p2p_seq_id": operation["sequence"] if is_message else 0,
        "op_id": operation["id"],
        "profiling_name": f"nccl:{name}",
        "time_created_ns": operation["created_ns"],
        "duration_ms": operation["duration_ms"] if is_complete else None,
        "input_sizes": operation["input_sizes"],
        "input_dtypes": operation["input_dtypes"],
        "output_sizes": operation["output_sizes"],
        "output_dtypes": operation["output_dtypes"],
        "state": "completed" if is_complete else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": operation["completed_ns"] or None,
        "retired": is_complete,
        "timeout_ms": operation["timeout_ms"],
        "is_p2p": is_message,
    }
