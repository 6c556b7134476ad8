"""Where the memory of a rank goes, measured, beside what was planned and what the ZeRO paper says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.tools.plan.formulas import Settings, bytes_per_kind, memory
from zeropg.tools.plan.shape import ModelShape

MIB = 2**20


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


def planned_bytes(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """What `python -m zeropg plan` says of the classes of `measured_bytes`, before anything is allocated."""
    kinds = bytes_per_kind(memory(shape, settings))
    kinds["optimizer"] += kinds.pop("masters")
    return {name: kinds[name] for name in ("parameters", "gradients", "optimizer", "buckets", "gathered")}


def memory_table(
    measured: dict[str, int], planned: dict[str, int], formula: dict[str, int], parameters: int, process_bytes: int
) -> str:
    """A table of `measured` bytes per class beside `planned` and the paper's `formula`, then what no formula covers.

    The classes of the formula come first and are summed. Others that the core reports (gathered units, buckets) and the
    whole process follow.
    """
    rows = [_row(name, measured.get(name, 0), planned[name], formula[name], parameters) for name in formula]
    total, planned_total = (sum(source.get(name, 0) for name in formula) for source in (measured, planned))
    rows.append(_row("sum", total, planned_total, sum(formula.values()), parameters))
    rows += [
        _row(name, measured[name], planned.get(name), None, parameters) for name in measured if name not in formula
    ]
    rows.append(("whole process (PSS)", _mib(process_bytes), "", "", ""))
    head = ("", "measured", "planned", "ZeRO's formula", "bytes/parameter")
    return "\n".join("  {:<20} {:>12} {:>12} {:>16} {:>17}".format(*row) for row in [head, *rows])


def _row(
    name: str, measured: int, planned: int | None, formula: int | None, parameters: int
) -> tuple[str, str, str, str, str]:
    expected, ideal = ("" if value is None else _mib(value) for value in (planned, formula))
    return name, _mib(measured), expected, ideal, f"{measured / parameters:.2f}"


def _mib(count: int) -> str:
    return f"{count / MIB:.2f} MiB"
