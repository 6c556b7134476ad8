"""Files of one directory that all ranks write together and rank 0 puts in place at once."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import torch

from zeropg._commit import INDEX_NAME, commit, remove_dead_leftovers, temporary_name, write_small_file
from zeropg._native import _C


class StagedFiles:
    """One rank's view of an export that is being written under temporary names.

    Nothing here communicates: the caller lets all ranks agree after each of `create` (rank 0), `open` (the others), the
    writes, `finish` and `commit` (rank 0). Until `commit` the directory's older content is untouched.
    """

    def __init__(self, directory: Path, layout: _C.Layout, token: str) -> None:
        self.directory = directory
        self._layout = layout
        self._token = token
        self._writers: list[_C.FileWriter] = []
        self._staging: _C.StagingBuffer | None = None
        self._companions: list[str] = []
        self._has_index = False
        self._made_directory = False

    @property
    def is_open(self) -> bool:
        """This rank can write: it made the files or sees them on a shared file system."""
        return bool(self._writers)

    def create(self, reserved_names: list[str]) -> None:
        """Makes all weight files with their full size and their headers.

        Args:
            reserved_names: further final names that will be committed; checked before any data is written.
        """
        self._made_directory = not self.directory.is_dir()
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_dead_leftovers(self.directory)
        for name in [*reserved_names, *(file.name for file in self._layout.files)]:
            if (self.directory / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, f"'{self.directory / name}' is a directory; remove or rename it")
        for file in self._layout.files:
            self._writers.append(_C.FileWriter.create(self._temporary(file.name), file.bytes))
        for writer, file in zip(self._writers, self._layout.files, strict=True):
            writer.write_bytes(0, file.header)

    def open(self) -> bool:
        """Opens the files that rank 0 made; False when this rank does not see them (no shared file system)."""
        writers = []
        for file in self._layout.files:
            try:
                writers.append(_C.FileWriter.open(self._temporary(file.name), file.bytes))
            except FileNotFoundError:
                return False
        self._writers = writers
        return True

    def write(self, place: _C.TensorPlace, start: int, flat: torch.Tensor, dtype: torch.dtype) -> None:
        """Writes `flat` ([numel], any dtype and device) as elements from `start` on of the tensor at `place`."""
        if self._staging is None:
            self._staging = _C.StagingBuffer()
        self._writers[place.file].write(place.offset + start * dtype.itemsize, flat, dtype, self._staging)

    def write_bytes(self, file: int, offset: int, data: bytes) -> None:
        """Writes bytes that another rank has cast."""
        self._writers[file].write_bytes(offset, data)

    def add_companion(self, name: str, content: bytes) -> None:
        """Stages a small file that goes with the weights (rank 0); left out when the directory holds it already."""
        with suppress(OSError):
            if (self.directory / name).read_bytes() == content:
                return
        write_small_file(Path(self._temporary(name)), content)
        self._companions.append(name)

    def add_index(self, content: bytes) -> None:
        """Stages the index of several weight files (rank 0)."""
        write_small_file(Path(self._temporary(INDEX_NAME)), content)
        self._has_index = True

    def finish(self) -> None:
        """What this rank wrote is on the disk when this returns."""
        for writer in self._writers:
            writer.sync()

    def commit(self) -> None:
        """Puts everything in place (rank 0 only, after every rank has finished)."""
        commit(
            self.directory,
            self._token,
            companions=self._companions,
            weights=[file.name for file in self._layout.files],
            has_index=self._has_index,
        )

    def close(self, *, is_committed: bool) -> None:
        """Closes the files; removes what was not committed, whichever rank made it."""
        # Any rank may remove: were rank 0 still renaming, it would meet a missing file and report it, and the order of
        # its renames keeps the older export whole.
        for writer in self._writers:
            with suppress(OSError):
                writer.close()
        self._writers = []
        if is_committed:
            return
        for name in [*(file.name for file in self._layout.files), *self._companions, INDEX_NAME]:
            with suppress(OSError):
                os.unlink(self._temporary(name))
        if self._made_directory:
            with suppress(OSError):
                self.directory.rmdir()

    def _temporary(self, name: str) -> str:
        return str(self.directory / temporary_name(self._token, name))
