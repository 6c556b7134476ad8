"""`python -m zeropg zero_to_fp32`: the job of DeepSpeed's script, with its arguments and its files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from zeropg._native import _C
from zeropg.export.plan import parse_size
from zeropg.rank_io.progress import progress
from zeropg.tools.export.command import describe
from zeropg.tools.export.source import DeepSpeedSource, Source, find, open_source
from zeropg.tools.export.write import Written, write_safetensors, written_dtype

_DESCRIPTION = """
Writes the fp32 weights of a checkpoint, as the script zero_to_fp32.py does that DeepSpeed puts into its checkpoints:
the same arguments, files and values, without DeepSpeed and without running pickles. It also reads zeropg's
checkpoints. What differs: frozen parameters of stage 1, which the script leaves out, are written, too; and
--safe_serialization works with tied weights, which are written once.

`python -m zeropg export` writes other dtypes, config.json beside the weights, and needs less memory than the default
format here, which holds one file's tensors at a time.
"""
_STEM = "pytorch_model"


def main(arguments: list[str]) -> int:
    """Convert what `arguments` name; returns the exit status."""
    options = _parse(arguments)
    try:
        source = open_source(find(options.checkpoint_dir, options.tag))
        try:
            written = _convert(source, options)
        finally:
            source.close()
    except (OSError, ValueError) as error:
        print(f"[zeropg] zero_to_fp32: {error}", file=sys.stderr)
        return 1
    print(describe(written, options.output_dir))
    return 0


def _convert(source: Source, options: argparse.Namespace) -> Written:
    left_out: frozenset[str] = frozenset()
    if options.exclude_frozen_parameters:
        if not isinstance(source, DeepSpeedSource):
            raise ValueError("--exclude_frozen_parameters: a checkpoint of zeropg does not say which were frozen")
        left_out = source.contents.frozen
    names = [name for name in source.tensors if name not in left_out]
    limit = parse_size(options.max_shard_size)
    if options.debug:
        for name in names:
            print(f"{name} {source.tensors[name].dtype} {list(source.tensors[name].shape)}", file=sys.stderr)
    if options.safe_serialization:
        return write_safetensors(source, names, options.output_dir, dtype=torch.float32, max_file_bytes=limit)
    return _write_pickles(source, names, options.output_dir, limit)


def _write_pickles(source: Source, names: list[str], directory: Path, limit: int) -> Written:
    """Writes files of torch.save that hold tensors alone; a file's tensors are in memory while it is written."""
    layout = _C.plan_layout(
        names=names,
        shapes=[list(source.tensors[name].shape) for name in names],
        dtypes=[written_dtype(source.tensors[name], torch.float32) for name in names],
        max_file_bytes=limit,
        stem=_STEM,
        metadata={},
    )
    files = [file.name.replace(".safetensors", ".bin") for file in layout.files]
    file_of = {name: files[place.file] for name, place in zip(names, layout.places, strict=True)}
    file_of |= {alias: file_of[kept] for alias, kept in source.aliases.items() if kept in file_of}
    directory.mkdir(parents=True, exist_ok=True)
    with progress("zero_to_fp32", layout.tensor_bytes, is_shown=True) as advance:
        for file in files:
            tensors: dict[str, torch.Tensor] = {}
            for name in (name for name in names if file_of[name] == file):
                tensors[name] = _whole(source, name)
                advance(tensors[name].nbytes)
            tied = {alias: tensors[kept] for alias, kept in source.aliases.items() if kept in tensors}
            _replace(directory / file, tensors | tied)
    if len(files) > 1:
        _write_index(directory, layout.tensor_bytes, file_of)
    return Written(files, len(file_of), layout.tensor_bytes)


def _whole(source: Source, name: str) -> torch.Tensor:
    stored = source.tensors[name]
    flat = torch.empty(torch.Size(stored.shape).numel(), dtype=written_dtype(stored, torch.float32))
    for start, values in source.pieces(name):
        flat[start : start + values.numel()] = values
    return flat.view(stored.shape)


def _replace(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        torch.save(tensors, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_index(directory: Path, total_bytes: int, file_of: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
    (directory / f"{_STEM}.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zeropg zero_to_fp32",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint_dir", type=Path, help="the folder with `latest` and the tags' folders")
    parser.add_argument("output_dir", type=Path, help="the folder to write; made if it does not exist")
    parser.add_argument(
        "--max_shard_size", default="5GB", help='most bytes of tensors in a file, such as "2GB" (default: 5GB)'
    )
    parser.add_argument(
        "--safe_serialization", action="store_true", help="write safetensors (default: pytorch_model.bin)"
    )
    parser.add_argument("-t", "--tag", help="which checkpoint (default: what `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave them out")
    parser.add_argument("-d", "--debug", action="store_true", help="print each tensor's name, dtype and shape")
    options = parser.parse_args(arguments)
    try:
        parse_size(options.max_shard_size)
    except ValueError as error:
        parser.error(str(error))
    return options
