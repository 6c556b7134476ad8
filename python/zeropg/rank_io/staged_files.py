"""Files of one export that all ranks write together and rank 0 puts in place at once."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from zeropg._native import _C
from zeropg.rank_io.commit import INDEX_NAME, commit, remove_dead_leftovers, temporary_name, write_small_file
from zeropg.rank_io.parallel_files import ByteRange, FileSpec, ParallelFiles


class StagedFiles:
    """One rank's view of an export that is being written under temporary names.

    Nothing here communicates: the caller lets all ranks agree after each of `create` (rank 0), `open` (the others), the
    writes, `finish` and `commit` (rank 0). Until `commit` the directory's older content is untouched.
    """

    def __init__(self, directory: Path, layout: _C.Layout, token: str) -> None:
        self.directory = directory
        self._layout = layout
        self._token = token
        specs = [FileSpec(self._temporary(file.name), file.bytes, file.header) for file in layout.files]
        self._files = ParallelFiles(specs)
        self._companions: list[str] = []
        self._has_index = False
        self._made_directory = False

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
        self._files.create()

    def open(self) -> bool:
        """Opens the files that rank 0 made; False when this rank does not see them (no shared file system)."""
        return self._files.open()

    def write(self, part: ByteRange) -> None:
        """Writes values at their place; `part.file` is an index into the layout's files."""
        self._files.write(part)

    def add_companion(self, name: str, content: bytes) -> None:
        """Stages a small file that goes with the weights (rank 0); the commit drops it where nothing changes."""
        write_small_file(Path(self._temporary(name)), content)
        self._companions.append(name)

    def add_index(self, content: bytes) -> None:
        """Stages the index of several weight files (rank 0)."""
        write_small_file(Path(self._temporary(INDEX_NAME)), content)
        self._has_index = True

    def finish(self) -> None:
        """What this rank wrote is on the disk when this returns."""
        self._files.sync()

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
        # its renames leaves the older export whole, or none where a companion changes.
        self._files.close()
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
