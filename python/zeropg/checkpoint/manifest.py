"""The manifest of a checkpoint: what is in which file, with checksums, and the one file whose rename is the commit.

    {"zeropg_checkpoint": 1, "crc32c": "xxxxxxxx", "manifest":
    {...}}

The checksum is that of the bytes from the second line's "{" to its "}". A reader trusts nothing before it has checked
that; lengths, offsets and names are checked on top of it, since who can write a file can also make a checksum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeropg._native import _C
from zeropg.checkpoint.regular_file import check_no_pipe
from zeropg.checkpoint.structure import dtype_name, dtype_of

MANIFEST_NAME = "zeropg_checkpoint.json"
# Format 2 is what holds named optimizers; with one optimizer or none the manifest is that of format 1.
_ALONE_VERSION, _NAMED_VERSION = 1, 2
ALONE = ""  # the name of an optimizer that is the only one and was given none
_HEAD = re.compile(rb'\{"zeropg_checkpoint": (\d{1,9}), "crc32c": "([0-9a-f]{8})", "manifest":\n')
_TAIL = b"}\n"
_MAX_BYTES = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
FOLDER_NAME = re.compile(r"data-[0-9a-f]{16}")

T = TypeVar("T")


@dataclass(frozen=True)
class SavedFile:
    """A data file. checksums: CRC-32C of each chunk of `Manifest.chunk_bytes`, the last one perhaps shorter."""

    size_bytes: int
    checksums: list[int]


@dataclass(frozen=True)
class SavedTensor:
    """Where a whole tensor stands, in C order, from byte `offset` of a file on."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class SavedOptimizer:
    """kind: the class, for messages. groups: torch's, with names in `params`, values as `_structure.encode` makes them.

    tensors, numbers: by parameter name and state key.
    """

    kind: str
    groups: list[dict[str, Any]]
    tensors: dict[str, dict[str, SavedTensor]]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        folder: the subfolder with the data files.
        origin: versions, world size, replicas, stage, how each kind of tensor was placed. For people, but for the
            replicas: residuals fit the same number only.
        world_size: of the job that saved; one `rank_extra` file per rank at most.
        tensors: parameters (masters) and buffers by the name they are saved under.
        aliases: other names of tied tensors.
        optimizers: by name; one that is alone and was given no name has the empty one.
        left_out: names of frozen parameters that the job that saved had, and did not save.
    """

    folder: str
    origin: dict[str, Any]
    world_size: int
    chunk_bytes: int
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    aliases: dict[str, str]
    optimizers: dict[str, SavedOptimizer]
    left_out: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        is_alone = self.optimizers.keys() <= {ALONE}
        optimizers = {name: _optimizer_to_json(optimizer) for name, optimizer in self.optimizers.items()}
        body = {
            "folder": self.folder,
            "origin": self.origin,
            "world_size": self.world_size,
            "chunk_bytes": self.chunk_bytes,
            "files": {
                name: {"bytes": file.size_bytes, "crc32c": "".join(f"{crc:08x}" for crc in file.checksums)}
                for name, file in self.files.items()
            },
            "tensors": _tensors_to_json(self.tensors),
            "aliases": self.aliases,
            **({"optimizer": optimizers.get(ALONE)} if is_alone else {"optimizers": optimizers}),
            **({"left_out": self.left_out} if self.left_out else {}),
        }
        version = _ALONE_VERSION if is_alone else _NAMED_VERSION
        text = json.dumps(body, allow_nan=False).encode()
        head = f'{{"zeropg_checkpoint": {version}, "crc32c": "{_C.crc32c(text):08x}", "manifest":\n'
        return head.encode() + text + _TAIL


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest in `directory`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, of another version, or no manifest of zeropg.
    """
    path = directory / MANIFEST_NAME
    check_no_pipe(path)
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    head = _HEAD.match(data)
    if head is None or not data.endswith(_TAIL) or len(data) > _MAX_BYTES:
        raise ValueError(f"'{path}' is damaged, cut off, or no manifest of a zeropg checkpoint")
    if int(head[1]) not in (_ALONE_VERSION, _NAMED_VERSION):
        raise ValueError(
            f"'{path}' is a checkpoint of format {int(head[1])}, expected {_ALONE_VERSION} or {_NAMED_VERSION}; load "
            "it with the version of zeropg that wrote it"
        )
    text = data[head.end() : -len(_TAIL)]
    found, expected = f"{_C.crc32c(text):08x}", head[2].decode()
    if found != expected:
        raise ValueError(f"'{path}' is damaged: its text has the CRC-32C {found}, expected {expected}")
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"'{path}' is no manifest that this version of zeropg writes: {error}") from error


def _optimizer_to_json(optimizer: SavedOptimizer) -> dict[str, Any]:
    return {
        "class": optimizer.kind,
        "groups": optimizer.groups,
        "tensors": {name: _tensors_to_json(state) for name, state in optimizer.tensors.items()},
        "numbers": optimizer.numbers,
    }


def _tensors_to_json(tensors: Mapping[str, SavedTensor]) -> dict[str, Any]:
    return {
        name: {"file": t.file, "offset": t.offset, "dtype": dtype_name(t.dtype), "shape": list(t.shape)}
        for name, t in tensors.items()
    }


def _parse(body: Any) -> Manifest:
    folder = _typed(body["folder"], str)
    if FOLDER_NAME.fullmatch(folder) is None:
        raise ValueError(f"the folder is called {folder!r}")
    chunk_bytes = _size(body["chunk_bytes"])
    files = _mapping(body["files"], _parse_file)
    for name in files:
        if _FILE_NAME.fullmatch(name) is None:
            raise ValueError(f"a file is called {name!r}")
    tensors = _mapping(body["tensors"], lambda entry: _parse_tensor(entry, files))
    aliases = _mapping(body["aliases"], lambda name: _typed(name, str))
    if not set(aliases.values()) <= tensors.keys():
        raise ValueError("an alias names no tensor")
    saved = body["optimizers"] if "optimizers" in body else {ALONE: body["optimizer"]}
    optimizers = _mapping(
        {name: entry for name, entry in _typed(saved, dict).items() if entry is not None},
        lambda entry: _parse_optimizer(entry, files),
    )
    origin = _mapping(body["origin"], lambda value: value)
    left_out = [_typed(name, str) for name in _typed(body.get("left_out", []), list)]
    world_size = _size(body["world_size"])
    return Manifest(folder, origin, world_size, chunk_bytes, files, tensors, aliases, optimizers, left_out)


def _parse_optimizer(entry: Any, files: Mapping[str, SavedFile]) -> SavedOptimizer:
    groups = [_mapping(group, lambda value: value) for group in _typed(entry["groups"], list)]
    for group in groups:
        if not all(isinstance(name, str) for name in _typed(group["params"], list)):
            raise ValueError("a param group holds something that is no name")
    tensors = _mapping(entry["tensors"], lambda state: _mapping(state, lambda value: _parse_tensor(value, files)))
    numbers = _mapping(entry["numbers"], lambda state: _mapping(state, lambda value: value))
    return SavedOptimizer(_typed(entry["class"], str), groups, tensors, numbers)


def _parse_file(entry: Any) -> SavedFile:
    text = _typed(entry["crc32c"], str)
    if re.fullmatch("(?:[0-9a-f]{8})*", text) is None:
        raise ValueError("checksums are no hexadecimal numbers")
    return SavedFile(_size(entry["bytes"]), [int(text[i : i + 8], 16) for i in range(0, len(text), 8)])


def _parse_tensor(entry: Any, files: Mapping[str, SavedFile]) -> SavedTensor:
    shape = tuple(_size(size) for size in _typed(entry["shape"], list))
    tensor = SavedTensor(_typed(entry["file"], str), _size(entry["offset"]), dtype_of(entry["dtype"]), shape)
    if tensor.file not in files:
        raise ValueError(f"a tensor stands in {tensor.file!r}, which is no file of the checkpoint")
    size_bytes = tensor.dtype.itemsize
    for size in shape:  # not torch.Size.numel: it overflows silently
        size_bytes *= size
    if tensor.offset + size_bytes > files[tensor.file].size_bytes:
        raise ValueError(f"a tensor of {size_bytes} bytes at {tensor.offset} does not fit into {tensor.file!r}")
    return tensor


def _mapping(value: Any, parse: Callable[[Any], T]) -> dict[str, T]:
    return {key: parse(entry) for key, entry in _typed(value, dict).items()}


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:100]!r} stands where a {kind.__name__} should")
    return value


def _size(value: Any) -> int:
    if not 0 <= _typed(value, int) < 1 << 62:
        raise ValueError(f"{value} stands where a size should")
    return int(value)
