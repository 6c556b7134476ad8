"""Puts finished files in the place of an older export.

Whoever looks, at any moment and after any crash, finds the older export whole, or the new one, or none: never a
mixture. The protocol stands in sharding/checkpoint/README.md.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropg.rank_io.directory_lock import take_directory_lock

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_TEMPORARY_NAMES = ".zeropg-*.tmp"
_KEPT_NAMES = ".zeropg-*.old"
# A temporary file is locked right after it is made (FileWriter.create); younger ones may not be locked yet.
_STALE_SECONDS = 60.0
_LOCK_SECONDS = 60.0
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True)
class WeightNames:
    """What the files of a format are called. shard: of one of several, of which the index says what is where."""

    single: str
    index: str
    shard: re.Pattern[str]


SAFETENSORS = WeightNames(SINGLE_NAME, INDEX_NAME, re.compile(r"model-\d{5}-of-\d{5}\.safetensors"))
PICKLES = WeightNames(
    "pytorch_model.bin", "pytorch_model.bin.index.json", re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
)


def temporary_name(token: str, name: str) -> str:
    """Returns the hidden name that `name` has until it is committed."""
    return f".zeropg-{token}-{name}.tmp"


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def write_small_file(path: Path, content: bytes) -> None:
    """Makes `path` (mode 0600, it must not exist) with `content`, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_dead_leftovers(directory: Path) -> None:
    """Removes temporary files of exports that were killed: old enough, and locked by nobody."""
    for path in directory.glob(_TEMPORARY_NAMES):
        with suppress(OSError):  # another user's, gone already, still locked, or no locks here: not ours to remove
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or time.time() - status.st_mtime < _STALE_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def commit(
    directory: Path,
    token: str,
    *,
    companions: list[str],
    weights: list[str],
    has_index: bool,
    names: WeightNames = SAFETENSORS,
) -> None:
    """Renames the temporary files of `token` to their final names, all of them complete and synced, in a safe order.

    Args:
        directory: where the files are.
        token: the export's random token.
        companions: final names of small files that go with the weights (config.json); those that change come first.
        weights: final names of the weight files: `[names.single]`, or all shards.
        has_index: the weights are shards; their index was written as a temporary file too.
    """
    with _locked(directory):
        changed = _drop_unchanged(directory, token, companions)
        if changed:
            _remove_older_export(directory, names)
        elif has_index:
            _keep_older_shards(directory, token, set(weights), names.index)
        for name in changed:
            os.replace(directory / temporary_name(token, name), directory / name)
        if changed:
            sync_directory(directory)
        for name in weights:
            os.replace(directory / temporary_name(token, name), directory / name)
        sync_directory(directory)
        if has_index:
            # transformers prefers the single file, so an older one is what readers get until it is removed.
            os.replace(directory / temporary_name(token, names.index), directory / names.index)
            sync_directory(directory)
            (directory / names.single).unlink(missing_ok=True)
        else:
            (directory / names.index).unlink(missing_ok=True)
        _remove_older_shards(directory, set(weights), names.shard)
        sync_directory(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    # Two jobs that commit into one directory at the same time must do so one after the other.
    held = f"another process holds the lock of '{directory}'"
    descriptor = take_directory_lock(directory, _LOCK_SECONDS, held=held)
    try:
        yield
    finally:
        os.close(descriptor)


def _drop_unchanged(directory: Path, token: str, companions: list[str]) -> list[str]:
    """Removes the temporary files of companions that the directory holds already; returns the names of the others."""
    changed = []
    for name in companions:
        temporary = directory / temporary_name(token, name)
        if _content(directory / name) == temporary.read_bytes():
            temporary.unlink()
        else:
            changed.append(name)
    return changed


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _remove_older_export(directory: Path, names: WeightNames) -> None:
    # No rename changes a companion and the weights at once, so from this moment until the new weights are in place the
    # directory holds no export at all. The index first: where both are, readers take the single file.
    found = [name for name in (names.index, names.single) if (directory / name).exists()]
    for name in found:
        (directory / name).unlink()
    if found:
        sync_directory(directory)


def _read_index(path: Path) -> dict[str, Any] | None:
    """Returns an index if there is one that a reader could use."""
    try:
        with open(path, "rb") as file:
            index = json.loads(file.read(_MAX_INDEX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        return None
    return index if all(isinstance(name, str) for name in index["weight_map"].values()) else None


def _keep_older_shards(directory: Path, token: str, names: set[str], index_name: str) -> None:
    # Renaming shard after shard over an older export of the same names would leave a mixture under the older index if
    # the process died half-way. So the older shards get second names first, and the older index is pointed at these.
    index = _read_index(directory / index_name)
    weight_map: dict[str, str] = index["weight_map"] if index else {}
    clashes = sorted({name for name in weight_map.values() if name in names and (directory / name).is_file()})
    if index is None or not clashes:
        return
    kept = {name: f".zeropg-{token}-{name}.old" for name in clashes}
    try:
        for name in clashes:
            os.link(directory / name, directory / kept[name])
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here: from this moment until the new index is in place the directory holds no export at all.
        (directory / index_name).unlink()
    else:
        index["weight_map"] = {tensor: kept.get(name, name) for tensor, name in weight_map.items()}
        temporary = directory / temporary_name(token, "older-index")
        write_small_file(temporary, json.dumps(index, indent=2, sort_keys=True).encode())
        sync_directory(directory)
        os.replace(temporary, directory / index_name)
    sync_directory(directory)


def _remove_older_shards(directory: Path, names: set[str], shard: re.Pattern[str]) -> None:
    for path in directory.glob("*"):
        if shard.fullmatch(path.name) and path.name not in names and path.is_file():
            path.unlink()
    for path in directory.glob(_KEPT_NAMES):
        path.unlink()
