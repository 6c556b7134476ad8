"""Weights as Hugging Face writes them: one safetensors file, or several with an index. Reads what is asked for."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropg._native import _C
from zeropg.checkpoint.foreign import describe_foreign
from zeropg.checkpoint.regular_file import check_no_pipe

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
PIECE_BYTES = 1 << 20  # stays in a core's cache from the read to the cast
_STEP_BYTES = 16 << 20  # of what needs no cast: between two moves of the progress bar
_MOST_HEADER_BYTES = 8 + 100_000_000  # of files that safetensors itself takes
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class StoredTensor:
    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # of its bytes in the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class SafetensorsFolder:
    """Opens a folder, or one file. `tensors`: by name.

    Raises FileNotFoundError where no safetensors are, ValueError for files that are short, lie or lack a tensor that
    the index names. Close it.
    """

    def __init__(self, directory: Path) -> None:
        self._files = ExitStack()
        self._descriptors: dict[Path, int] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            index = _read_index(directory)
            for path in sorted(set(index.values())) if index else _files_in(directory):
                self._open(path)
            for name, path in index.items():
                if name not in self.tensors or self.tensors[name].path != path:
                    raise ValueError(f"'{directory / _INDEX}' says that '{name}' is in '{path.name}', but it is not")
        except BaseException:
            self.close()
            raise

    def pieces(self, tensor: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values), 1 MiB at a time, of elements [start, stop) of the flat tensor.

        Each tensor is valid until the next. Raises ValueError where the file ends before, OSError as reads do.
        """
        # Read, not mapped: pages of a mapped file would count as this process's memory.
        width = tensor.dtype.itemsize
        step = PIECE_BYTES // width
        buffer = bytearray(min(step, max(0, stop - start)) * width)
        for first in range(start, stop, step):
            numel = min(step, stop - first)
            _read_whole(self._descriptors[tensor.path], tensor, first * width, memoryview(buffer)[: numel * width])
            yield first, torch.frombuffer(buffer, dtype=tensor.dtype, count=numel)

    def into_place(self, tensor: StoredTensor, start: int, room: torch.Tensor) -> Iterator[int]:
        """Reads elements from `start` of the flat tensor into `room`, contiguous, on the CPU and of the tensor's dtype.

        Yields how many bytes have come, some MiB at a time. Raises as `pieces`.
        """
        places = memoryview((ctypes.c_char * room.nbytes).from_address(room.data_ptr())).cast("B")
        for first in range(0, room.nbytes, _STEP_BYTES):
            place = places[first : first + _STEP_BYTES]
            _read_whole(self._descriptors[tensor.path], tensor, start * tensor.dtype.itemsize + first, place)
            yield len(place)

    def close(self) -> None:
        self._descriptors.clear()
        self._files.close()

    def _open(self, path: Path) -> None:
        check_no_pipe(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._files.callback(os.close, descriptor)
            entries, data_offset = _header(descriptor)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"'{path}' is missing, though the index names it: copy the folder again") from error
        except (ValueError, OSError) as error:
            raise ValueError(
                f"'{path}' is damaged or no safetensors file ({error}): copy it again, or save it in another dtype"
            ) from error
        self._descriptors[path] = descriptor
        for name, dtype, shape, begin, _ in entries:
            if dtype not in _DTYPES:
                raise ValueError(f"'{name}' in '{path}' has dtype {dtype}, which cannot be loaded")
            if name in self.tensors:
                raise ValueError(f"'{name}' stands in '{self.tensors[name].path}' and in '{path}': which one counts?")
            self.tensors[name] = StoredTensor(name, path, tuple(shape), dtype, data_offset + begin)


def _header(descriptor: int) -> tuple[list[Any], int]:
    """Returns [(name, dtype, shape, first byte, end)], and where these bytes are counted from.

    Raises ValueError for a header that is wrong, or does not fit the size of the file.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    head = os.pread(descriptor, min(8 + length, size, _MOST_HEADER_BYTES), 0)
    tensors, _, data_offset = _C.parse_safetensors_header(head, size)
    return tensors, data_offset


def _read_whole(descriptor: int, tensor: StoredTensor, first_byte: int, room: memoryview) -> None:
    done = 0
    while done < len(room):
        got = os.preadv(descriptor, [room[done:]], tensor.offset + first_byte + done)
        if got == 0:
            raise ValueError(
                f"'{tensor.path}' was cut off while it was read: '{tensor.name}' ends early; copy it again"
            )
        done += got


def _read_index(directory: Path) -> dict[str, Path]:
    path = directory / _INDEX
    if not path.is_file() or (directory / _SINGLE).is_file():  # from_pretrained, too, takes the single file first
        return {}
    try:
        names = json.loads(path.read_text())["weight_map"]
        index = {str(name): directory / str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' is no index of safetensors files ({error!r}): copy it again") from error
    if outside := [file for file in index.values() if file.parent != directory]:
        raise ValueError(f"'{path}' names '{outside[0]}', which is outside of its folder")
    return index


def _files_in(directory: Path) -> list[Path]:
    if directory.is_file() and directory.suffix == ".safetensors":
        return [directory]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if files := sorted(directory.glob("*.safetensors")):
        return files
    raise FileNotFoundError(f"'{directory}' holds no safetensors files: {describe_foreign(directory)}")
