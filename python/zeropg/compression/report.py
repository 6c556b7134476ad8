"""What compression has saved and cost so far, for people."""

import math
from dataclasses import dataclass, field

import torch

from zeropg.compression.coding import Coding
from zeropg.compression.state import State

_MOST_NAMED = 5


@dataclass(frozen=True)
class Report:
    """This rank's figures since the model was sharded or the `State` was made. Bytes are of what it encoded itself.

    codec: what is used now; the figures are of all that were.
    plain_bytes, encoded_bytes: of fp32 values before, and after; what travels is a multiple of it, the same for both.
      Weights of a Plan count too.
    encode_seconds, decode_seconds: selecting and adding up included.
    wire_seconds: the rest of the encoded calls: copies, the wire, and waiting for ranks.
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
    """What compression has saved and cost so far for a model of `fully_shard`, or for a `State`. No communication.

    Between steps. Raises ValueError for a model that is not sharded, or sharded without compression.
    """
    state = source if isinstance(source, State) else getattr(source, "_zeropg_state", None)
    coding: Coding | None = getattr(state, "coding", None)
    if coding is None:
        raise ValueError(
            "[zeropg] compression.report: the model has no compressed gradients or weights; expected one of "
            "fully_shard(model, compression=...), or the State of DDP and FSDP2."
        )
    counters = coding.meter.counters()
    return Report(
        codec=coding.describe(),
        plain_bytes=int(counters["plain_bytes"]),
        encoded_bytes=int(counters["encoded_bytes"]),
        encode_seconds=counters["encode_seconds"],
        decode_seconds=counters["decode_seconds"],
        wire_seconds=counters["wire_seconds"],
        exposed_seconds=None if coding.exposed_seconds is None else coding.exposed_seconds(),
        residual_norms=coding.residual_norms(),
    )
