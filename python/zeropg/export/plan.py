"""What an export holds: the model's tensors under the names, dtypes and file places that they get. No communication."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropg._native import _C
from zeropg.quantization.packed_layer import PackedLayer
from zeropg.rank_io.directory_path import directory_path
from zeropg.sharding.state import ShardedState
from zeropg.tensor_parallel.distributed import is_distributed, placements_text

_EXPORT_DTYPES = (torch.bfloat16, torch.float16)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B|B?)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class ExportTensor:
    """One tensor of the export."""

    name: str  # in the file
    value: torch.Tensor  # the parameter (maybe only a handle) or the buffer
    dtype: torch.dtype  # in the file
    packed: PackedLayer | None = None  # the layer that has only its bytes


@dataclass(frozen=True)
class ExportPlan:
    """The same on every rank, but for `tensors`' values and `token`."""

    directory: Path
    tensors: list[ExportTensor]
    index_of: dict[str, int]  # every name of every tensor -> index into `tensors` and `layout.places`
    layout: _C.Layout
    arguments: dict[str, str]  # what must not differ between ranks, by its name in messages


def make_plan(
    state: ShardedState, directory: str | os.PathLike[str], dtype: torch.dtype, max_shard_size: int | str
) -> ExportPlan:
    """Checks the arguments of `save_16bit_weights` and lays the model's tensors out in files."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected torch.bfloat16 or torch.float16")
    if dtype not in _EXPORT_DTYPES:
        raise ValueError(f"dtype is {dtype}, expected a 16-bit one: torch.bfloat16 or torch.float16")
    max_bytes = parse_size(max_shard_size)
    path = directory_path(directory)
    tensors, aliases = _collect(state, dtype)
    layout = _C.plan_layout(
        names=[tensor.name for tensor in tensors],
        shapes=[list(tensor.value.shape) for tensor in tensors],
        dtypes=[tensor.dtype for tensor in tensors],
        max_file_bytes=max_bytes,
        stem="model",
        metadata={**aliases, "format": "pt"},
    )
    index_of = {tensor.name: index for index, tensor in enumerate(tensors)}
    index_of |= {alias: index_of[name] for alias, name in aliases.items()}
    description = [(tensor.name, list(tensor.value.shape), str(tensor.dtype)) for tensor in tensors]
    arguments = {
        "directory": str(path),
        "dtype": str(dtype),
        "max_shard_size": str(max_bytes),
        "the model's tensors (digest)": hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16],
    }
    return ExportPlan(path, tensors, index_of, layout, arguments)


def parse_size(size: int | str) -> int:
    """Returns bytes. `size` is a number of bytes or text such as "5GB" (powers of 1000) or "5GiB" (powers of 1024)."""
    expected = 'expected a positive number of bytes or text like "5GB" or "500MiB"'
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"max_shard_size is {size!r}, {expected}")
    size_bytes = size if isinstance(size, int) else _parse_size_text(size)
    if size_bytes is None or not 0 < size_bytes < 1 << 63:
        raise ValueError(f"max_shard_size is {size!r}, {expected}")
    return size_bytes


def _parse_size_text(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, letter, binary = match.groups()
    power = "KMGT".index(letter.upper()) + 1 if letter else 0
    return int(float(number) * float(1024 if binary else 1000) ** power)


def index_json(names: Sequence[str], parameters: int, layout: _C.Layout) -> bytes:
    """Returns the text of model.safetensors.index.json, which says which tensor is in which file.

    names: in the order of the layout's places. parameters: elements of all tensors.
    """
    index = {
        "metadata": {"total_parameters": parameters, "total_size": layout.tensor_bytes},
        "weight_map": {name: layout.files[place.file].name for name, place in zip(names, layout.places, strict=True)},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def companion_files(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, bytes]:
    """Returns the files that `from_pretrained` needs beside the weights, by name; none for a plain module."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return {}
    config = copy.deepcopy(config)
    # What the weights are from now on, not what the live model trains in: from_pretrained loads in this dtype.
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(prefix="zeropg-export-") as folder:
        config.save_pretrained(folder)
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _collect(state: ShardedState, dtype: torch.dtype) -> tuple[list[ExportTensor], dict[str, str]]:
    """Returns the tensors in the order of `state_dict()`, and the written name by each other name of a tied one."""
    model = state.model
    for prefix, module in model.named_modules():
        if has_extra_state(module):
            warnings.warn(f"the extra state of module '{prefix}' is not exported: it is no tensor", stacklevel=2)
    names_of: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, value in named_tensors(model):
        names_of.setdefault(id(value), []).append(name)
        values[id(value)] = value
    tied_patterns = _tied_patterns(model)
    sharded = {id(parameter) for group in state.core.flat_groups for _, parameter, _, _ in group.slots}
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    packed = {id(m.packed_weight): m for m in model.modules() if isinstance(m, PackedLayer)}
    tensors = []
    aliases: dict[str, str] = {}
    for key, names in names_of.items():
        if left_out.intersection(names):
            continue
        # transformers ties the declared names to the other one when it loads.
        written = next((name for name in names if not any(p.search(name) for p in tied_patterns)), names[0])
        if key in packed:  # what takes its place: written with the values that the bytes stand for
            written = written.removesuffix("packed_weight") + "weight"
            _refuse_part(written, packed[key].packed_weight, "its bytes are of no place of the whole weight")
            tensors.append(ExportTensor(written, packed[key].weight, dtype, packed[key]))
            continue
        if key not in sharded:
            _refuse_part(written, values[key], "fully_shard was not given it, so that nobody knows who has which part")
        tensors.append(ExportTensor(written, values[key], _export_dtype(written, values[key], dtype)))
        aliases |= {name: written for name in names if name != written}
    return tensors, aliases


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and persistent buffers under all their names, in the order of `state_dict()`.

    Without asking that: hooks may make it raise on sharded parameters.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer


def has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _tied_patterns(model: torch.nn.Module) -> list[re.Pattern[str]]:
    patterns = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        # A dict (tied name -> source) in transformers 5, a list of patterns before.
        for key in getattr(module, "_tied_weights_keys", None) or ():
            patterns.append(re.compile(f"^{re.escape(prefix + '.') if prefix else ''}(?:{key})"))
    return patterns


def _refuse_part(name: str, value: torch.Tensor, why: str) -> None:
    if is_distributed(value):
        raise NotImplementedError(f"'{name}' is a DTensor ({placements_text(value)}), and {why}; export it apart")


def _export_dtype(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    if isinstance(value, torch.nn.Parameter) and value.is_complex():
        raise NotImplementedError(f"'{name}' is {value.dtype}; complex parameters have no 16-bit form in safetensors")
    return dtype if value.is_floating_point() else value.dtype
