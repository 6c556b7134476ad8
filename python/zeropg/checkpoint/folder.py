"""The directory of a checkpoint: who may write, what is committed, what is left over.

    directory/zeropg_checkpoint.json     the manifest; names the folder that counts
    directory/data-<token>/*.safetensors

One rename, of the manifest, replaces one checkpoint by the next; the folder of the older one goes only when the newer
is durable. Files of others in the directory are never touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeropg.checkpoint.manifest import FOLDER_NAME, MANIFEST_NAME, Manifest, read_manifest
from zeropg.rank_io.commit import sync_directory, write_small_file
from zeropg.rank_io.directory_lock import take_directory_lock

_LOCK_SECONDS = 10.0


class CheckpointFolder:
    """Rank 0's view of one save. Nothing here communicates."""

    def __init__(self, directory: Path, token: str) -> None:
        self.directory = directory
        self.data = directory / f"data-{token}"
        self.is_committed = False
        self._lock: int | None = None

    def create(self) -> None:
        """Takes the directory's lock, removes what killed saves have left, and makes the data folder.

        Raises OSError: another process saves into the directory, or the file system refuses.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            where = f"'{self.directory}' cannot be a directory: it, or a part of its path, is a file or a broken link"
            raise NotADirectoryError(errno.ENOTDIR, f"{where}; give another path") from error
        held = f"another process is saving into '{self.directory}'; give each job a directory of its own"
        self._lock = take_directory_lock(self.directory, _LOCK_SECONDS, held=held)
        if (self.directory / MANIFEST_NAME).is_dir():
            raise IsADirectoryError(errno.EISDIR, f"'{self.directory / MANIFEST_NAME}' is a directory; remove it")
        self._remove_others()
        self.data.mkdir(mode=0o700)

    def commit(self, manifest: Manifest) -> None:
        """Makes the data folder, whose files are complete and synced, the checkpoint of the directory."""
        sync_directory(self.data)
        temporary = self._temporary()
        temporary.unlink(missing_ok=True)
        write_small_file(temporary, manifest.to_bytes())
        sync_directory(self.directory)
        os.replace(temporary, self.directory / MANIFEST_NAME)
        self.is_committed = True  # readers find it from here on
        sync_directory(self.directory)
        if self.directory.parent != self.directory:
            with suppress(PermissionError):  # it may be another's; then it was there before
                sync_directory(self.directory.parent)
        self._remove_others()

    def close(self) -> None:
        """Removes what was not committed and gives the lock back. Any rank may call it, whoever made the files."""
        if not self.is_committed and not self._is_current():
            shutil.rmtree(self.data, ignore_errors=True)
            if self._lock is not None:
                with suppress(OSError):
                    self._temporary().unlink(missing_ok=True)
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
            os.close(self._lock)
            self._lock = None

    def _is_current(self) -> bool:
        """Whether the manifest names this folder: a rename that was interrupted may have happened all the same."""
        try:
            return read_manifest(self.directory).folder == self.data.name
        except (FileNotFoundError, ValueError):
            return False
        except OSError:
            return True  # unknown; the next save removes what is left

    def _temporary(self) -> Path:
        return self.directory / f".{MANIFEST_NAME}.tmp"

    def _remove_others(self) -> None:
        try:
            current = read_manifest(self.directory).folder
        except FileNotFoundError:
            current = None
        except ValueError:
            return  # damaged: somebody may want to look at the data
        for path in self.directory.glob("data-*"):
            if FOLDER_NAME.fullmatch(path.name) and path.name != current and not path.is_symlink():
                with suppress(OSError), _locked_for_removal(path):
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def reading(data: Path) -> Iterator[None]:
    """Keeps a saving process from removing the folder while it is read, where the file system has locks."""
    descriptor = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _locked_for_removal(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise  # somebody reads it; the next save removes it
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(descriptor)
