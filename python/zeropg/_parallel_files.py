"""Files that all ranks write at the same time, each its own byte ranges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from zeropg._native import _C


class FileSpec(NamedTuple):
    """A file as it will be: rank 0 makes it with all its bytes reserved and `header` at its beginning."""

    path: str
    size_bytes: int
    header: bytes


class ByteRange(NamedTuple):
    """Values that belong in file number `file` from `offset` on: flat, any device and dtype, to be cast to `dtype`."""

    file: int
    offset: int
    values: torch.Tensor
    dtype: torch.dtype

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
        self._writers: list[_C.FileWriter] = []
        self._staging: _C.StagingBuffer | None = None

    def create(self) -> None:
        """Makes all files with their full size and their headers (rank 0)."""
        for spec in self._specs:
            self._add(_C.FileWriter.create(spec.path, spec.size_bytes))
        for writer, spec in zip(self._writers, self._specs, strict=True):
            writer.write_bytes(0, spec.header)

    def open(self) -> bool:
        """Opens the files that rank 0 made; False when this rank does not see them (no shared file system)."""
        try:
            for spec in self._specs:
                self._add(_C.FileWriter.open(spec.path, spec.size_bytes))
        except FileNotFoundError:
            self.close()
            return False
        return True

    def write(self, part: ByteRange) -> None:
        if self._staging is None:
            self._staging = _C.StagingBuffer()
        self._writers[part.file].write(part.offset, part.values, part.dtype, self._staging)

    def sync(self) -> None:
        """What this rank wrote is on the disk when this returns."""
        for writer in self._writers:
            writer.sync()

    def checksums(self) -> list[list[tuple[int, int, int]]]:
        """Per file, (start, stop, CRC-32C) of each piece that this rank wrote."""
        return [writer.checksums() for writer in self._writers]

    def close(self) -> None:
        for writer in self._writers:
            with suppress(OSError):
                writer.close()
        self._writers = []

    def _add(self, writer: _C.FileWriter) -> None:
        if self._chunk_bytes is not None:
            writer.keep_checksums(self._chunk_bytes)
        self._writers.append(writer)
