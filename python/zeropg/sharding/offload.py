"""Where optimizer state and masters are kept between steps: `Offload`, the value of `offload_optimizer`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.rank_io.agreement import together

if TYPE_CHECKING:
    from typing import Literal

_MIB = 2**20
TIERS = {tier.device: tier for tier in _C.tiers()}


@dataclass(frozen=True, kw_only=True)
class Offload:
    """A place outside of the memory that computes: the value of `fully_shard(offload_optimizer=)`.

    Args:
        device: "cpu": host memory; on a model that computes on the CPU it changes nothing. "nvme": a file on a local
            disk.
        path: for "nvme": an existing directory of this rank; jobs and ranks may share one. The file has no name in it
            and mode 0600; it is gone when the process ends, however it ends.
        buffer_bytes: bytes of memory through which a step passes what is in the file; at least 48 KiB. They do not grow
            with the model.
        threads: threads that read and write the file; at least 1.
        pin_memory: for "cpu" beside a GPU: whether host memory is page-locked, so that copies overlap.

    Raises ValueError for other devices, a path that is missing or out of place, or numbers out of range.
    """

    device: Literal["cpu", "nvme"]
    path: str | os.PathLike[str] | None = None
    buffer_bytes: int = 64 * _MIB
    threads: int = 4
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if self.device not in TIERS:
            raise ValueError(f"[zeropg] Offload: device is {self.device!r}; expected {' or '.join(map(repr, TIERS))}")
        if TIERS[self.device].has_path != (self.path is not None):
            wanted = "a directory on a local disk" if TIERS[self.device].has_path else "None"
            raise ValueError(
                f"[zeropg] Offload: device is {self.device!r} and path is {self.path!r}; expected {wanted} as path"
            )
        for name, least in (("buffer_bytes", 48 * 1024), ("threads", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"[zeropg] Offload: {name} is {getattr(self, name)!r}; expected at least {least}")


def offload_of(value: Any, argument: str) -> Offload | None:
    """Returns what an `offload_...` argument means: None, "cpu", a directory, or an Offload."""
    if value is None or isinstance(value, Offload):
        return value
    if isinstance(value, str) and value in TIERS and not TIERS[value].has_path:
        return Offload(device=value)  # type: ignore[arg-type]
    if isinstance(value, str | os.PathLike) and os.fspath(value) not in ("", *TIERS, "disk", "cuda", "none"):
        return Offload(device="nvme", path=value)
    raise ValueError(
        f"[zeropg] fully_shard: {argument} is {value!r}; expected None, 'cpu', a directory on a local disk, or "
        "zeropg.Offload(device='nvme', path=...)"
    )


def leaves_memory(offload: Offload, device: torch.device) -> bool:
    """Whether that is another place than the memory in which a model on `device` computes."""
    return not (TIERS[offload.device].is_host_memory and device.type == "cpu")


def check_offload_params(value: Any, device: torch.device) -> None:
    """Raises NotImplementedError unless parameters may stay where they are."""
    offload = offload_of(value, "offload_params")
    if offload is not None and leaves_memory(offload, device):
        raise NotImplementedError(
            f"[zeropg] fully_shard: offload_params to {offload.path or offload.device} of a model on {device.type} is "
            "not available; offload_params='cpu' on a CPU model and offload_optimizer='cpu' or '/a/directory' are"
        )


def open_offload(offload: Offload | None, device: torch.device, group: dist.ProcessGroup) -> _C.Offload | None:
    """Opens this rank's tier; None where it is the memory that computes. Collective: all ranks open or all raise."""
    if offload is None or not leaves_memory(offload, device):
        return None
    opened: list[_C.Offload] = []

    def make() -> None:
        opened.append(
            _C.make_offload(
                device=offload.device,
                directory=os.fspath(offload.path or ""),
                threads=offload.threads,
                is_pinned=offload.pin_memory,
                buffer_bytes=offload.buffer_bytes,
                rank=group.rank(),
                world_size=group.size(),
            )
        )

    together(group, "fully_shard", make)
    return opened[0]


def human_bytes(count: int) -> str:
    """Returns '12.3 MiB'."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count} bytes"
