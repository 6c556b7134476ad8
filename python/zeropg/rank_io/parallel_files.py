"""Files that all ranks write at the same time, each its own byte ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from zeropg._native import _C

_CAST_BYTES = 4 << 20  # as the core's writer


class FileSpec(NamedTuple):
    """A file as it will be: rank 0 makes it with all its bytes reserved and `header` at its beginning.

    Where it is not shared by all ranks, it is opened by who writes into it, when it does: nobody holds a descriptor for
    every rank of the group.
    """

    path: str
    size_bytes: int
    header: bytes
    is_shared: bool = True


class ByteRange(NamedTuple):
    """Values that belong in file number `file` from `offset` on: flat, any device and dtype, to be cast to `dtype`.

    Or rows of values [count, n], each of which begins `stride` bytes after the one before.
    """

    file: int
    offset: int
    values: torch.Tensor
    dtype: torch.dtype
    stride: int = 0

    @property
    def size_bytes(self) -> int:
        return self.values.numel() * self.dtype.itemsize


class ParallelFiles:
    """One rank's writers on a list of files. Nothing here communicates: the caller lets the ranks agree.

    chunk_bytes: keep CRC-32C checksums of what this rank writes, in chunks of this size.
    """

    def __init__(self, specs: Sequence[FileSpec], *, chunk_bytes: int | None = None) -> None:
        self._specs = specs
        self._chunk_bytes = chunk_bytes
        self._writers: dict[int, _C.FileWriter] = {}  # by the file's number
        self._staging: _C.StagingBuffer | None = None

    def create(self) -> None:
        """Makes all files with their full size and their headers (rank 0)."""
        for number, spec in enumerate(self._specs):
            writer = _C.FileWriter.create(spec.path, spec.size_bytes)
            if spec.is_shared:
                self._add(number, writer)
            else:
                writer.close()
        for number, writer in self._writers.items():
            writer.write_bytes(0, self._specs[number].header)

    def open(self) -> bool:
        """Opens the files that rank 0 made; False when this rank does not see them (no shared file system)."""
        try:
            for number, spec in enumerate(self._specs):
                if spec.is_shared:
                    self._add(number, _C.FileWriter.open(spec.path, spec.size_bytes))
        except FileNotFoundError:
            self.close()
            return False
        return True

    def write(self, part: ByteRange) -> None:
        if self._staging is None:
            self._staging = _C.StagingBuffer()
        if part.file not in self._writers:
            spec = self._specs[part.file]
            self._add(part.file, _C.FileWriter.open(spec.path, spec.size_bytes))
        writer = self._writers[part.file]
        if part.values.dim() == 1:
            writer.write(part.offset, part.values, part.dtype, self._staging)
            return
        for offset, row in _rows(part):
            writer.write_bytes(offset, row)

    def sync(self) -> None:
        """What this rank wrote is on the disk when this returns."""
        for writer in self._writers.values():
            writer.sync()

    def checksums(self) -> list[list[tuple[int, int, int]]]:
        """Per file, (start, stop, CRC-32C) of each piece that this rank wrote."""
        return [
            self._writers[number].checksums() if number in self._writers else [] for number in range(len(self._specs))
        ]

    def close(self) -> None:
        for writer in self._writers.values():
            with suppress(OSError):
                writer.close()
        self._writers = {}

    def _add(self, number: int, writer: _C.FileWriter) -> None:
        if self._chunk_bytes is not None:
            writer.keep_checksums(self._chunk_bytes)
        self._writers[number] = writer


def _rows(part: ByteRange) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of each row: cast some MiB at a time, since a row may be a few elements."""
    row_bytes = part.values.size(1) * part.dtype.itemsize
    offset = part.offset
    for rows in part.values.detach().split(max(1, _CAST_BYTES // row_bytes)):
        data = rows.to("cpu", part.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for at in range(0, len(data), row_bytes):
            yield offset, data[at : at + row_bytes]
            offset += part.stride
