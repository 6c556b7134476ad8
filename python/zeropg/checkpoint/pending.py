"""Saves of checkpoints that go on in the background."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Protocol

from zeropg.sharding.state import ShardedState


class BackgroundSave(Protocol):
    """What writes a checkpoint."""

    rank: int
    directory: Path

    def snapshot(self) -> None:
        """Copies what training changes. Collective."""

    def write_in_background(self) -> None:
        """Writes and commits; on a thread of its own."""

    def close(self) -> None:
        """Frees what the save holds."""


class PendingCheckpoint:
    """A save that goes on in the background; `save_checkpoint(async_save=True)` returns it."""

    def __init__(self, save: BackgroundSave) -> None:
        self._save = save
        self._failure: BaseException | None = None
        self._is_told = False
        save.snapshot()
        # Not a daemon: the interpreter waits for it.
        self._thread = threading.Thread(target=self._run, name="zeropg-save-checkpoint")
        _RUNNING.add(self)
        try:
            self._thread.start()
        except BaseException:
            _RUNNING.discard(self)
            raise

    def done(self) -> bool:
        """Returns whether the save has ended, with or without an error. Never waits."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is committed. Raises the save's error, once; it is the same on every rank.

        Ranks may call it or not. timeout: seconds after which it raises TimeoutError; the save goes on.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"[zeropg] save_checkpoint: not finished after {timeout} s; it goes on")
        failure, is_told = self._failure, self._is_told
        self._is_told = True
        if failure is not None and not is_told:
            raise failure

    def result(self, timeout: float | None = None) -> Path:
        """Waits as `wait` does, and returns the directory."""
        self.wait(timeout)
        return self._save.directory

    def join_if_into(self, directory: Path) -> None:
        """Waits, if the save writes into this directory. Raises nothing of it."""
        if self._save.directory.resolve() == directory.resolve() and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._save.write_in_background()
        except BaseException as error:
            self._failure = error
            if self._save.rank == 0:  # nobody may ever ask
                warnings.warn(f"{error} (in the background)", stacklevel=1)
        finally:
            _RUNNING.discard(self)
            self._save.close()


_RUNNING: set[PendingCheckpoint] = set()  # of this process


def join_saves(state: ShardedState, directory: Path) -> None:
    """Waits for the model's save that is going on, and for others' in this process into the directory.

    Raises the error of the model's own if nobody has been told.
    """
    for other in list(_RUNNING):
        other.join_if_into(directory)
    pending, state.pending_save = state.pending_save, None
    if pending is None:
        return
    try:
        pending.wait()
    except Exception as error:
        words = re.sub(r"^\[zeropg rank \d+/\d+[^\]]*\] ", "", str(error))
        raise type(error)(f"the save before failed in the background: {words}") from error
