"""Writes the weights of a source as Hugging Face's safetensors files, a few MiB at a time."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeropg._native import _C
from zeropg.export.plan import index_json
from zeropg.rank_io.commit import INDEX_NAME
from zeropg.rank_io.parallel_files import ByteRange
from zeropg.rank_io.progress import progress
from zeropg.rank_io.staged_files import StagedFiles
from zeropg.tools.export.source import Described, Source

_COMPANIONS = ("config.json", "generation_config.json")
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Written:
    """What an export has made."""

    files: list[str]
    tensors: int
    bytes: int


def written_dtype(tensor: Described, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in the files: floating ones are cast to `dtype`, by default nothing is."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def write_safetensors(
    source: Source,
    names: Sequence[str],
    directory: Path,
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int | None,
    around: Sequence[Path] = (),
) -> Written:
    """Writes tensors into `directory`, in which an older export stays whole until this one is complete.

    Args:
        dtype: of floating tensors in the files; None: as they are stored.
        max_file_bytes: of tensors in one file, a larger tensor gets its own; None: one file.
        around: folders in which the model's config.json may stand; the first one found goes with the weights.

    Raises OSError, naming the path: a file cannot be written. Then the directory is as it was.
    """
    dtypes = [written_dtype(source.tensors[name], dtype) for name in names]
    aliases = {name: kept for name, kept in source.aliases.items() if kept in set(names)}
    layout = _C.plan_layout(
        names=list(names),
        shapes=[list(source.tensors[name].shape) for name in names],
        dtypes=dtypes,
        max_file_bytes=max_file_bytes or _NO_LIMIT,
        stem="model",
        metadata={**aliases, "format": "pt"},
    )
    files = StagedFiles(directory, layout, secrets.token_hex(8))
    is_committed = False
    companions = _companions(around, dtype)
    try:
        files.create([*companions, INDEX_NAME])
        for name, content in companions.items():
            files.add_companion(name, content)
        if len(layout.files) > 1:
            numel = sum(torch.Size(source.tensors[name].shape).numel() for name in names)
            files.add_index(index_json(names, numel, layout))
        with progress("export", layout.tensor_bytes, is_shown=True) as advance:
            for name, place, kind in zip(names, layout.places, dtypes, strict=True):
                for start, values in source.pieces(name):
                    part = ByteRange(place.file, place.offset + start * kind.itemsize, values, kind)
                    files.write(part)
                    advance(part.size_bytes)
            files.finish()
        files.commit()
        is_committed = True
    finally:
        files.close(is_committed=is_committed)
    return Written([file.name for file in layout.files], len(names), layout.tensor_bytes)


def _companions(around: Sequence[Path], dtype: torch.dtype | None) -> dict[str, bytes]:
    """The model's configuration for from_pretrained, where there is one beside the checkpoint, with the dtype now."""
    found: dict[str, bytes] = {}
    for name in _COMPANIONS:
        path = next((folder / name for folder in around if (folder / name).is_file()), None)
        if path is None:
            continue
        found[name] = path.read_bytes()
        if name == _COMPANIONS[0] and dtype is not None:
            found[name] = _with_dtype(path, dtype)
    return found


def _with_dtype(path: Path, dtype: torch.dtype) -> bytes:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"'{path}' is no JSON ({error}): repair or remove it") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"'{path}' holds no JSON object: repair or remove it")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return (json.dumps({**config, key: str(dtype).removeprefix("torch.")}, indent=2) + "\n").encode()
