"""The model's tensors of a checkpoint, read without a model and without other ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from zeropg._native import _C
from zeropg.checkpoint.folder import reading
from zeropg.checkpoint.foreign import describe_foreign
from zeropg.checkpoint.manifest import Manifest, SavedTensor, read_manifest
from zeropg.checkpoint.regular_file import check_no_pipe

_STEP_BYTES = 16 << 20  # of what needs no cast: between two moves of the progress bar
_PIECE_BYTES = 1 << 20  # stays in a core's cache from the copy to the cast


def read_pieces(reader: _C.FileReader, saved: SavedTensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first element, values) of elements [start, stop); each tensor is valid until the next."""
    step = _PIECE_BYTES // saved.dtype.itemsize
    buffer = torch.empty(min(step, stop - start), dtype=saved.dtype)
    for at in range(start, stop, step):
        values = buffer[: min(step, stop - at)]
        reader.read(saved.offset + at * saved.dtype.itemsize, saved.dtype, values)
        yield at, values


def read_into_place(reader: _C.FileReader, saved: SavedTensor, start: int, room: torch.Tensor) -> Iterator[int]:
    """Reads elements from `start` into `room`, which has the saved dtype. Yields how many bytes have come, in turn."""
    step = _STEP_BYTES // saved.dtype.itemsize
    for at in range(0, room.numel(), step):
        part = room[at : at + step]
        reader.read(saved.offset + (start + at) * saved.dtype.itemsize, saved.dtype, part)
        yield part.nbytes


def manifest_in(directory: Path) -> Manifest:
    """Reads the manifest. Raises FileNotFoundError that says what the directory is instead, else as read_manifest."""
    try:
        return read_manifest(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"'{directory}' holds no checkpoint of zeropg.save_checkpoint that this rank sees: "
            f"{describe_foreign(directory)}"
        ) from error


class SavedTensors:
    """Opens a checkpoint's model files. Close it.

    tensors: by name. aliases: other names of tied ones. left_out: names of frozen parameters that were not saved.

    Raises FileNotFoundError, ValueError or OSError as `load_checkpoint` does.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        manifest = manifest_in(Path(directory))
        data = Path(directory) / manifest.folder
        self.tensors = manifest.tensors
        self.aliases = manifest.aliases
        self.left_out = manifest.left_out
        self._resources = ExitStack()
        try:
            self._resources.enter_context(reading(data))
            self._readers: dict[str, _C.FileReader] = {}
            for name in {tensor.file for tensor in manifest.tensors.values()}:
                check_no_pipe(data / name)
                file = manifest.files[name]
                self._readers[name] = _C.FileReader(
                    str(data / name), file.size_bytes, manifest.chunk_bytes, file.checksums
                )
        except BaseException:
            self.close()
            raise

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values), 1 MiB at a time; each is valid until the next, and its checksum was right."""
        saved = self.tensors[name]
        yield from read_pieces(self._readers[saved.file], saved, 0, saved.numel)

    def close(self) -> None:
        self._resources.close()
