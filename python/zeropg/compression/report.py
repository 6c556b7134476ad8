"""What compression has saved and cost so far, for people."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.compression.state import State

_MOST_NAMED = 5


@dataclass(frozen=True)
class Report:
    """This rank's figures since the model was sharded or the `State` was made. Bytes are of what it encoded itself.

    plain_bytes, encoded_bytes: of fp32 values before, and after; what travels is a multiple of it, the same for both.
    encode_seconds, decode_seconds: selecting and adding up included.
    wire_seconds: collectives of this process's zeropg groups, less the two above: copies, the wire, and waiting for
      ranks. Those that are not encoded count too.
    exposed_seconds: in which the model waited for its communication; None for a `State`, whose waits are DDP's.
    residual_norms: of what is still owed to each parameter (error feedback), the largest first.
    """

    codec: str
    plain_bytes: int
    encoded_bytes: int
    encode_seconds: float
    decode_seconds: float
    wire_seconds: float
    exposed_seconds: float | None
    residual_norms: dict[str, float] = field(default_factory=dict)

    @property
    def residual_norm(self) -> float:
        return math.hypot(*self.residual_norms.values())

    def __str__(self) -> str:
        saved = self.plain_bytes - self.encoded_bytes
        share = self.encoded_bytes / self.plain_bytes if self.plain_bytes else 1.0
        times = {"encode": self.encode_seconds, "decode": self.decode_seconds, "wire": self.wire_seconds}
        if self.exposed_seconds is not None:
            times["exposed"] = self.exposed_seconds
        lines = [
            f"compression: {self.codec}",
            f"  bytes    {self.plain_bytes / 1e6:,.1f} MB became {self.encoded_bytes / 1e6:,.1f} MB ({share:.1%}): "
            f"{saved / 1e6:,.1f} MB saved",
            "  seconds  " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in times.items()),
        ]
        if self.residual_norms:
            largest = [f"{name} {norm:.3g}" for name, norm in list(self.residual_norms.items())[:_MOST_NAMED]]
            lines.append(f"  owed     norm {self.residual_norm:.3g}; the most: {', '.join(largest)}")
        return "\n".join(lines)


def report(source: torch.nn.Module | State) -> Report:
    """What the gradients of a model of `fully_shard`, or of a `State`, have saved and cost so far. No communication.

    Between steps. Raises ValueError for a model that is not sharded, or without compressed gradients.
    """
    if isinstance(source, State):
        if source.compressor is None:
            raise ValueError('[zeropg] compression.report: "auto" compresses nothing here; there is nothing to report.')
        compressor, residuals, exposed = source.compressor, source.residuals, None
    else:
        core: Any = getattr(source, "_zeropg", None)
        if core is None or core.codec is None:
            raise ValueError(
                "[zeropg] compression.report: the model has no compressed gradients; expected one of "
                "fully_shard(model, compression=...), or the State of DDP and FSDP2."
            )
        compressor, residuals, exposed = core.codec, core.residuals, core.communication_seconds()
    counters = compressor.counters()
    coding = counters["encode_seconds"] + counters["decode_seconds"]
    return Report(
        codec=compressor.description,
        plain_bytes=int(counters["plain_bytes"]),
        encoded_bytes=int(counters["encoded_bytes"]),
        encode_seconds=counters["encode_seconds"],
        decode_seconds=counters["decode_seconds"],
        wire_seconds=max(0.0, collective_seconds() - coding),
        exposed_seconds=exposed,
        residual_norms=_norms(residuals),
    )


def collective_seconds() -> float:
    """In which collectives of this process's zeropg groups have run so far."""
    backends = {id(backend): backend for group in dist.distributed_c10d._world.pg_map for backend in _zeropg_of(group)}
    return math.fsum(counted["seconds"] for backend in backends.values() for counted in backend.stats().values())


def _zeropg_of(group: dist.ProcessGroup) -> list[Any]:
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for CPU tensors
        return []
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    return [backend] if isinstance(backend, _C.ProcessGroupZero) else []


def _norms(residuals: _C.ResidualStore | None) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, _, _, values in [] if residuals is None else residuals.segments():
        squares[name] = squares.get(name, 0.0) + float(values.double().square().sum())
    return {name: math.sqrt(each) for name, each in sorted(squares.items(), key=lambda item: -item[1])}
