"""`python -m zeropg export`: Hugging Face safetensors out of a checkpoint, ours or DeepSpeed's, without its job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from zeropg.export.plan import parse_size
from zeropg.tools.command_line import make_parser
from zeropg.tools.export.source import Source, find, open_source, warn_of_left_out
from zeropg.tools.export.write import Written, write_safetensors, written_dtype
from zeropg.tools.quantities import size

_DESCRIPTION = """
Makes Hugging Face's safetensors of a checkpoint: one process on one machine reads it, whatever number of ranks saved
it, and no model is built. CHECKPOINT is a folder of zeropg.save_checkpoint, of an engine's save_checkpoint (with one
folder for each tag), or of DeepSpeed: stages 0 to 3, and universal checkpoints. A config.json beside the checkpoint
goes with the weights, so that from_pretrained(OUT) loads them.
"""
_EXAMPLES = """
what is written:
  parameters     from the fp32 masters; of stage 0 of DeepSpeed in 16 bits, as its model file has them
  buffers        persistent ones
  tied weights   once; their other names stand in the files' metadata

Tensors are read 4 MiB at a time, so memory does not grow with the model. OUT holds an older export until the new one is
complete. Pickles are read as data: one that asks for more is refused, and nothing of it runs.

examples:
  python -m zeropg export checkpoints out                                the tag that `latest` names, as it is stored
  python -m zeropg export checkpoints out --tag global_step500           another tag
  python -m zeropg export checkpoints out --dtype bfloat16               half the size, for inference
  python -m zeropg export checkpoints out --max-shard-size 2GB           several files and their index
  python -m zeropg export checkpoints --list                             what would be written; nothing is
  python -m zeropg zero_to_fp32 checkpoints out                          with the arguments of DeepSpeed's script

status: 0 written; 1 the checkpoint cannot be read or the files cannot be written; 2 wrong options
"""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: list[str]) -> int:
    """Export what `arguments` name; returns the exit status."""
    options = _parse(arguments)
    dtype = _DTYPES.get(options.dtype)
    try:
        found = find(options.checkpoint, options.tag)
        source = open_source(found)
        try:
            names = list(source.tensors)
            warn_of_left_out(source, "export")
            if options.list:
                _print_tensors(source, names, dtype)
                return 0
            written = write_safetensors(
                source,
                names,
                options.out,
                dtype=dtype,
                max_file_bytes=options.max_shard_size,
                around=found.around,
            )
        finally:
            source.close()
    except (OSError, ValueError) as error:
        print(f"[zeropg] export: {error}", file=sys.stderr)
        return 1
    print(describe(written, options.out))
    return 0


def describe(written: Written, out: Path) -> str:
    files = written.files[0] if len(written.files) == 1 else f"{written.files[0]} ... {written.files[-1]}"
    return f"{out}: {files}, {written.tensors} tensors, {size(written.bytes)}"


def _print_tensors(source: Source, names: list[str], dtype: torch.dtype | None) -> None:
    width = max(map(len, names), default=0)
    for name in names:
        tensor = source.tensors[name]
        kind = str(written_dtype(tensor, dtype)).removeprefix("torch.")
        print(f"{name:{width}}  {kind:9}  {list(tensor.shape)}")
    for alias, kept in source.aliases.items():
        print(f"{alias:{width}}  is {kept}")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("export", _DESCRIPTION, _EXAMPLES, allow_abbrev=True)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the checkpoint's folder, or one tag's")
    parser.add_argument(
        "out", type=Path, nargs="?", metavar="OUT", help="the folder to write; made if it does not exist"
    )
    parser.add_argument("--tag", "-t", help="which of several checkpoints (default: what the file `latest` names)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of floating tensors, rounded to nearest even (default: as stored)"
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help='most bytes of tensors in a file, such as "2GB" or "500MiB"; a larger tensor gets its own (default: 5GB)',
    )
    parser.add_argument("--list", action="store_true", help="print names, dtypes and shapes, and write nothing")
    options = parser.parse_args(arguments)
    if options.out is None and not options.list:
        parser.error("expected OUT, the folder to write, or --list")
    return options
