"""Weights as Hugging Face writes them: one safetensors file, or several with an index. Reads what is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeropg.checkpoint.foreign import describe_foreign
from zeropg.checkpoint.regular_file import check_no_pipe

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PIECE_BYTES = 4 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

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
        self._handles: dict[Path, Any] = {}
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
        """Yields (first element, values), 4 MiB or one row at a time, of elements [start, stop) of the flat tensor."""
        if start >= stop:
            return
        if not tensor.shape:
            yield 0, self._handles[tensor.path].get_tensor(tensor.name).reshape(-1)
            return
        rows = self._handles[tensor.path].get_slice(tensor.name)
        row = tensor.numel // tensor.shape[0]
        step = max(1, _PIECE_BYTES // (row * tensor.dtype.itemsize))
        for first in range(start // row, -(-stop // row), step):
            last = min(first + step, -(-stop // row))
            values = rows[first:last].reshape(-1)
            begin, end = max(start, first * row), min(stop, last * row)
            yield begin, values[begin - first * row : end - first * row]

    def close(self) -> None:
        self._handles.clear()
        self._files.close()

    def _open(self, path: Path) -> None:
        check_no_pipe(path)
        try:
            handle = self._files.enter_context(safe_open(str(path), framework="pt"))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"'{path}' is missing, though the index names it: copy the folder again") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"'{path}' is damaged or no safetensors file ({error}): copy it again") from error
        self._handles[path] = handle
        for name in handle.keys():  # noqa: SIM118 (it is no dict)
            view = handle.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise ValueError(f"'{name}' in '{path}' has dtype {view.get_dtype()}, which cannot be loaded")
            if name in self.tensors:
                raise ValueError(f"'{name}' stands in '{self.tensors[name].path}' and in '{path}': which one counts?")
            self.tensors[name] = StoredTensor(name, path, tuple(view.get_shape()), _DTYPES[view.get_dtype()])


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
