"""GPUs and NCCL, as torch sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from zeropg.tools.doctor.finding import Finding
from zeropg.tools.quantities import size


def check() -> Iterator[Finding]:
    """What there is, or which of torch, driver and device is missing."""
    if torch.version.cuda is None:
        yield Finding("GPU", "no", "this torch is built without CUDA; CPU tensors only", "a CUDA build of torch")
        return
    if not torch.cuda.is_available():
        yield Finding("GPU", "no", _why_not(), "nothing, where there is no GPU: everything but CUDA tensors works")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding("GPU", "ok", f"{index}: {facts.name}, {size(facts.total_memory)}, sm_{facts.major}{facts.minor}")
    if not dist.is_nccl_available():
        yield Finding("NCCL", "no", "this torch has none, so CUDA tensors cannot be sent", "a torch with NCCL")
        return
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    yield Finding("NCCL", "ok", f"{version}, in torch; CUDA tensors of a zeropg group go through it")


def _why_not() -> str:
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "none: there is no /dev/nvidia*"
    if not Path("/proc/driver/nvidia/version").exists():
        return "/dev has a GPU, but no NVIDIA driver is loaded"
    return f"there is a GPU and a driver, but torch (CUDA {torch.version.cuda}) cannot use them; see nvidia-smi"
