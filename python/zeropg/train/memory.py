"""Where the memory of a rank goes, measured, beside what the ZeRO paper says it should be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MIB = 2**20

# ZeRO (arXiv:1910.02054), section 3: which class each stage begins to shard.
_SHARDED_FROM_STAGE = {"optimizer": 1, "gradients": 2, "parameters": 3}


def resident_bytes() -> int:
    """The process's proportional set size: its own pages, and its share of pages that ranks have in common.

    The resident set size would count the shared-memory arena once in every rank. Where the kernel hides smaps_rollup
    (some sandboxes do), that is all there is.
    """
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        rollup = Path("/proc/self/status").read_text()
    found = re.search(r"^(?:Pss|VmRSS):\s+(\d+) kB$", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def measured_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that zeropg holds for the sharded `model`, by class, on the rank that holds most; every rank calls it."""
    core: Any = model._zeropg
    report: dict[str, int] = core.memory_report()
    state = optimizer.state_dict()["state"].values()  # of this rank alone
    moments = sum(value.nbytes for entry in state for value in entry.values() if isinstance(value, torch.Tensor))
    report["optimizer"] = report.pop("masters") + moments
    largest = torch.tensor(list(report.values()), device=next(model.parameters()).device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(report, largest.tolist(), strict=True))


def zero_formula(stage: int, world_size: int, parameters: int, param_dtype: torch.dtype) -> dict[str, int]:
    """Bytes per rank of training `parameters` numbers with Adam, by class, as the ZeRO paper counts them.

    With 16-bit parameters: 2 bytes of weight and 2 of gradient, 12 of optimizer state (float32 master, mean, variance).
    With float32: 4, 4 and 8, since the weight is its own master. What a stage shards is divided by the ranks.
    """
    width = param_dtype.itemsize
    bytes_each = {"parameters": width, "gradients": width, "optimizer": 12 if width == 2 else 2 * width}
    return {
        name: parameters * each // (world_size if stage >= _SHARDED_FROM_STAGE[name] else 1)
        for name, each in bytes_each.items()
    }


def memory_table(measured: dict[str, int], formula: dict[str, int], parameters: int, process_bytes: int) -> str:
    """A table of `measured` bytes per class beside `formula`, then what no formula covers.

    The classes of the formula come first and are summed. Others that the core reports (gathered units, staging) and the
    whole process follow.
    """
    rows = [_row(name, measured.get(name, 0), formula[name], parameters) for name in formula]
    rows.append(_row("sum", sum(measured.get(name, 0) for name in formula), sum(formula.values()), parameters))
    rows += [_row(name, measured[name], None, parameters) for name in measured if name not in formula]
    rows.append(("whole process (PSS)", _mib(process_bytes), "", ""))
    head = ("", "measured", "ZeRO's formula", "bytes/parameter")
    return "\n".join("  {:<20} {:>12} {:>16} {:>17}".format(*row) for row in [head, *rows])


def _row(name: str, measured: int, formula: int | None, parameters: int) -> tuple[str, str, str, str]:
    expected = "" if formula is None else _mib(formula)
    return name, _mib(measured), expected, f"{measured / parameters:.2f}"


def _mib(count: int) -> str:
    return f"{count / MIB:.2f} MiB"
