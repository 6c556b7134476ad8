"""The bytes of a packed weight, from a matrix and back; compression/README.md says what each byte is."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from zeropg._native import _C

FORMATS = ("nf4", "int4", "int8")
_HEADER_BYTES = 16
_SCALE_BYTES = 2
_CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Packing(NamedTuple):
    """What the header of a packed weight says."""

    format: str
    block: int  # values per scale
    rows: int
    columns: int


def pack(weight: torch.Tensor, format: str, block: int) -> torch.Tensor:
    """Returns the bytes (uint8, one dimension, on the weight's device) of a floating matrix.

    Raises ValueError for a format, a block or a shape that cannot be.
    """
    return _C.pack_weight(weight.detach().to("cpu", torch.float32).contiguous(), format, block).to(weight.device)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix [rows, columns] on the device of its bytes; each value is rounded to nearest even.

    Raises ValueError for bytes that are no packed weight.
    """
    coded = dtype if dtype in _CODED_DTYPES else torch.float32
    unpacked = _C.unpack_weight(packed, coded) if packed.device.type == "cpu" else unpack_with_torch(packed, coded)
    return unpacked.to(dtype)


def unpack_with_torch(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `unpack`, in torch's operations: for devices that the core has no kernels for. The same bits."""
    format, block, rows, columns = describe(packed)
    numel = rows * columns
    full, rest = divmod(numel, block)
    block_bytes = _SCALE_BYTES + (block if format == "int8" else block // 2)
    split = _HEADER_BYTES + full * block_bytes
    values = _decode(packed[_HEADER_BYTES:split].view(full, block_bytes), format, block).view(-1)
    if rest:
        values = torch.cat([values, _decode(packed[split:].view(1, -1), format, rest).view(-1)])
    return values.view(rows, columns).to(dtype)


def describe(packed: torch.Tensor) -> Packing:
    """Raises ValueError where the first bytes are not those of a packed weight."""
    known = packed[:_HEADER_BYTES].tolist()
    if len(known) < _HEADER_BYTES or bytes(known[:3]) != b"ZQ\x01" or not 1 <= known[3] <= len(FORMATS) or not known[4]:
        raise ValueError("[zeropg] packed weight: the bytes hold no packed weight of this version")
    rows, columns = (int.from_bytes(bytes(known[at : at + 4]), "little") for at in (8, 12))
    return Packing(FORMATS[known[3] - 1], 32 * known[4], rows, columns)


def _decode(blocks: torch.Tensor, format: str, count: int) -> torch.Tensor:
    """blocks: [number, bytes of one]. Returns [number, count], fp32."""
    scale = (blocks[:, 0:1].int() << 16 | blocks[:, 1:2].int() << 24).view(torch.float32)
    codes = blocks[:, _SCALE_BYTES:].contiguous()
    if format == "int8":
        levels = codes.view(torch.int8).float()
    else:
        halves = torch.cat([codes & 15, codes >> 4], dim=1)[:, :count]
        levels = torch.tensor(_levels(format), device=blocks.device)[halves.int()]
    return torch.where(scale.isfinite(), levels * scale, float("nan"))


@functools.cache
def _levels(format: str) -> list[float]:
    """What the codes 0 to 15 stand for, of which the core has the only table."""
    header = [*b"ZQ", 1, FORMATS.index(format) + 1, 1, 0, 0, 0, 1, 0, 0, 0, 16, 0, 0, 0]
    scale_and_codes = [0x80, 0x3F, *(code | (code + 8) << 4 for code in range(8))]  # 1.0 as a bfloat16
    packed = torch.tensor(header + scale_and_codes, dtype=torch.uint8, device="cpu")
    levels: list[float] = _C.unpack_weight(packed, torch.float32).view(-1).tolist()
    return levels
