"""Writes the weights of a source as files of torch.save, in the place of an older export at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from zeropg._native import _C
from zeropg.rank_io.commit import (
    INDEX_NAME,
    PICKLES,
    SINGLE_NAME,
    commit,
    remove_dead_leftovers,
    temporary_name,
    write_small_file,
)
from zeropg.rank_io.progress import progress
from zeropg.tools.export.source import Source
from zeropg.tools.export.write import Written, written_dtype


def write_pickles(source: Source, names: Sequence[str], directory: Path, *, max_file_bytes: int) -> Written:
    """Writes fp32 tensors, and no other objects, into files that torch.load(weights_only=True) reads.

    One file's tensors are in memory at a time. An older export stays whole until this one is complete.

    Raises:
        FileExistsError: safetensors are there already, which readers would take instead.
        OSError: a file cannot be written; the directory's older content is as it was.
    """
    layout = _C.plan_layout(
        names=list(names),
        shapes=[list(source.tensors[name].shape) for name in names],
        dtypes=[written_dtype(source.tensors[name], torch.float32) for name in names],
        max_file_bytes=max_file_bytes,
        stem=PICKLES.single.removesuffix(".bin"),
        metadata={},
    )
    files = [file.name.replace(".safetensors", ".bin") for file in layout.files]
    file_of = {name: files[place.file] for name, place in zip(names, layout.places, strict=True)}
    file_of |= {alias: file_of[kept] for alias, kept in source.aliases.items() if kept in file_of}
    token = secrets.token_hex(8)
    _prepare(directory, [*files, PICKLES.index])
    with ExitStack() as staged, progress("zero_to_fp32", layout.tensor_bytes, is_shown=True) as advance:
        for file in files:
            tensors: dict[str, torch.Tensor] = {}
            for name in (name for name in names if file_of[name] == file):
                tensors[name] = _whole(source, name)
                advance(tensors[name].nbytes)
            tied = {alias: tensors[kept] for alias, kept in source.aliases.items() if kept in tensors}
            _stage(staged, directory / temporary_name(token, file), tensors | tied)
        if len(files) > 1:
            index = directory / temporary_name(token, PICKLES.index)
            staged.callback(index.unlink, missing_ok=True)
            write_small_file(index, _index_json(layout.tensor_bytes, file_of))
        commit(directory, token, companions=[], weights=files, has_index=len(files) > 1, names=PICKLES)
    return Written(files, len(file_of), layout.tensor_bytes)


def _prepare(directory: Path, names: Sequence[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if found := next((name for name in (SINGLE_NAME, INDEX_NAME) if (directory / name).exists()), None):
        raise FileExistsError(
            errno.EEXIST, f"'{directory / found}' is there, which from_pretrained prefers: write into another directory"
        )
    if found := next((name for name in names if (directory / name).is_dir()), None):
        raise IsADirectoryError(errno.EISDIR, f"'{directory / found}' is a directory; remove or rename it")
    remove_dead_leftovers(directory)


def _stage(staged: ExitStack, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a temporary file, which stays locked, so that nobody takes it for a dead one, until `staged` ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = staged.enter_context(os.fdopen(descriptor, "wb"))
    staged.callback(path.unlink, missing_ok=True)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    torch.save(dict(tensors), file)
    file.flush()
    os.fsync(descriptor)


def _whole(source: Source, name: str) -> torch.Tensor:
    stored = source.tensors[name]
    flat = torch.empty(torch.Size(stored.shape).numel(), dtype=written_dtype(stored, torch.float32))
    for start, values in source.pieces(name):
        flat[start : start + values.numel()] = values
    return flat.view(stored.shape)


def _index_json(total_bytes: int, file_of: Mapping[str, str]) -> bytes:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
