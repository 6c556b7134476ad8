"""`python -m zeropg zero_to_fp32`: the job of DeepSpeed's script, with its arguments and its files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from zeropg.export.plan import parse_size
from zeropg.tools.command_line import make_parser
from zeropg.tools.export.command import describe
from zeropg.tools.export.source import DeepSpeedSource, Source, find, open_source, warn_of_left_out
from zeropg.tools.export.write import Written, write_safetensors
from zeropg.tools.export.write_pickles import write_pickles

_DESCRIPTION = """
Writes the fp32 weights of a checkpoint, as the script zero_to_fp32.py does that DeepSpeed puts into its checkpoints:
the same arguments, files and values, without DeepSpeed and without running pickles. It also reads zeropg's
checkpoints. What differs: frozen parameters of stage 1, which the script leaves out, are written, too; and
--safe_serialization works with tied weights, which are written once.

`python -m zeropg export` writes other dtypes, config.json beside the weights, and needs less memory than the default
format here, which holds one file's tensors at a time.
"""


def main(arguments: list[str]) -> int:
    """Convert what `arguments` name; returns the exit status."""
    options = _parse(arguments)
    try:
        source = open_source(find(options.checkpoint_dir, options.tag))
        try:
            warn_of_left_out(source, "zero_to_fp32")
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
    if isinstance(source, DeepSpeedSource) and source.contents.stage == 0:
        _warn_of_16_bits(source, names)
    if options.debug:
        for name in names:
            print(f"{name} {source.tensors[name].dtype} {list(source.tensors[name].shape)}", file=sys.stderr)
    if options.safe_serialization:
        return write_safetensors(source, names, options.output_dir, dtype=torch.float32, max_file_bytes=limit)
    return write_pickles(source, names, options.output_dir, max_file_bytes=limit)


def _warn_of_16_bits(source: Source, names: list[str]) -> None:
    narrow = [name for name in names if source.tensors[name].dtype in (torch.float16, torch.bfloat16)]
    if narrow:
        print(
            f"[zeropg] zero_to_fp32: warning: {len(narrow)} tensors, such as '{narrow[0]}', are stored in 16 bits and "
            "have no more precision in fp32: stage 0 of DeepSpeed saves its masters without names",
            file=sys.stderr,
        )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("zero_to_fp32", _DESCRIPTION, allow_abbrev=True)
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
