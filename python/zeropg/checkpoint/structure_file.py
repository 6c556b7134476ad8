"""Nested values as one safetensors file: their JSON in the file's metadata, their tensors as the file's tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from zeropg._native import _C
from zeropg.checkpoint.structure import decode, encode
from zeropg.rank_io.parallel_files import ByteRange

_KEY = "zeropg"
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class StructureFile:
    """Values that are ready to be written. `tensors` are on the CPU and nobody else's."""

    layout: _C.Layout
    tensors: list[torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return self.layout.files[0].bytes

    def ranges(self, file: int) -> Iterator[ByteRange]:
        """Yields all bytes of the file, whose number is `file`; the header too."""
        header = torch.frombuffer(bytearray(self.layout.files[0].header), dtype=torch.uint8)
        yield ByteRange(file, 0, header, torch.uint8)
        for tensor, place in zip(self.tensors, self.layout.places, strict=True):
            yield ByteRange(file, place.offset, tensor.reshape(-1), tensor.dtype)


def make_structure_file(values: Mapping[str, Any]) -> StructureFile:
    """Encodes values by their names, by which messages and the file call them. Raises TypeError as `encode` does."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> Any:
        tensors[name] = tensor.to("cpu", copy=True).contiguous()
        return {"$tensor": name}

    text = json.dumps({name: encode(value, name, keep) for name, value in values.items()}, allow_nan=False)
    layout = _C.plan_layout(
        names=list(tensors),
        shapes=[list(tensor.shape) for tensor in tensors.values()],
        dtypes=[tensor.dtype for tensor in tensors.values()],
        max_file_bytes=_NO_LIMIT,
        stem="structure",
        metadata={_KEY: text},
    )
    return StructureFile(layout, list(tensors.values()))


def read_structure_file(reader: _C.FileReader, names: Set[str]) -> dict[str, Any]:
    """Returns the values that `make_structure_file` took, by `names`. Raises ValueError for another file."""
    length = int.from_bytes(reader.read_bytes(0, min(8, reader.bytes)), "little")
    head = reader.read_bytes(0, min(8 + length, reader.bytes))
    tensors, metadata, data_offset = _C.parse_safetensors_header(head, reader.bytes)
    entries = {name: (dtype, shape, data_offset + begin) for name, dtype, shape, begin, _ in tensors}
    if _KEY not in metadata:
        raise ValueError(f"'{reader.path}' holds no nested value of zeropg")

    def fetch(kept: Any) -> torch.Tensor:
        name = kept.get("$tensor") if isinstance(kept, dict) else None
        if name not in entries:
            raise ValueError(f"'{reader.path}' has no tensor {name!r}")
        dtype, shape, offset = entries[name]
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        reader.read(offset, dtype, flat)
        return flat.view(shape)

    try:
        values = json.loads(metadata[_KEY])
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"'{reader.path}' holds something else than {', '.join(sorted(names))}")
        return {name: decode(value, fetch) for name, value in values.items()}
    except RecursionError:
        raise ValueError(f"'{reader.path}' holds a value that is nested too deep") from None
