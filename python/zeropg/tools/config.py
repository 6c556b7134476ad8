"""`python -m zeropg config`: what becomes of each key of a DeepSpeed configuration."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from zeropg.deepspeed.config import KEYS, ConfigError
from zeropg.deepspeed.config.batch import BatchSizes, batch_sizes, data_parallel_size
from zeropg.deepspeed.config.read import Reading, examine
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.config.validate import key_paths
from zeropg.deepspeed.config.verdict import shown
from zeropg.tools.command_line import make_parser

_DESCRIPTION = """
Reads a DeepSpeed configuration (the JSON of deepspeed.initialize, Hugging Face's Trainer or ms-swift) and prints, key
by key, what zeropg does with it. Nothing is trained and no rank is started. Keys that it does not set have DeepSpeed's
defaults.
"""
_EXAMPLES = """
what becomes of a key:
  honoured       it means what it means in DeepSpeed
  mapped         zeropg's own means do what it asks for, or what is at least as exact
  no effect      nothing here hangs on it, and no result either; zeropg.deepspeed.initialize warns once
  not asked for  the key is one that is refused, but this value asks for nothing
  auto           somebody fills it: Hugging Face's Trainer does, or zeropg.deepspeed.config.fill
  refused        it would train something else; the remedy stands below the table

examples:
  python -m zeropg config ds_config.json                   can this be used?
  python -m zeropg config ds_config.json --world-size 8    do its batch sizes fit on eight ranks?
  python -m zeropg config ds_config.json --json            the same for programs
  python -m zeropg config --keys                           all keys, their defaults and what becomes of them

status: 0 the configuration can be used; 1 it is refused; 2 wrong options
"""
_LEAST_WIDTH, _MOST_WIDTH = 120, 160


class Row(NamedTuple):
    """A line of the table."""

    key: str
    value: str
    outcome: str
    does: str


def main(arguments: list[str]) -> int:
    """Print what `arguments` ask for; returns the exit status."""
    options = _parse(arguments)
    if options.keys:
        defaults = dict(key_paths())
        _print_table([Row(key, shown(defaults[key]), KEYS[key].fate, _of_key(key)) for key in KEYS])
        return 0
    reading: Reading | None = None
    sizes: BatchSizes | None = None
    try:
        reading = examine(load(options.config))
        problems = reading.refused
        sizes = None if problems else _batch_sizes(reading, options.world_size)
    except ConfigError as error:
        problems = list(error.problems)
    rows = [] if reading is None else _rows(reading)
    notices = () if reading is None else reading.notices
    if options.json:
        print(json.dumps(_answer(rows, notices, problems, sizes), indent=2))
    else:
        _print(str(options.config), rows, notices, problems)
        if sizes is not None:
            print(_arithmetic(sizes))
    return 1 if problems else 0


def _rows(reading: Reading) -> list[Row]:
    rows = [Row(one.key, shown(one.value), one.outcome, one.does) for one in reading.verdicts]
    rows += [Row(one.key, "auto", "auto", f"To be filled with {one.filled_by}.") for one in reading.unfilled]
    places = {key: place for place, key in enumerate(KEYS)}
    return sorted(rows, key=lambda row: places.get(row.key, places.get(row.key.rpartition(".")[0], 0)))


def _batch_sizes(reading: Reading, world_size: int | None) -> BatchSizes | None:
    """The sizes on so many ranks; None where they are not known yet. Raises ConfigError where they do not fit."""
    names = BatchSizes._fields
    if world_size is None or any(one.key in names for one in reading.unfilled):
        return None
    train, micro, accumulation = (getattr(reading.config, name) for name in names)
    ranks = data_parallel_size(world_size, reading.config.tensor_parallel.size)
    return batch_sizes(train, micro, accumulation, ranks)


def _arithmetic(sizes: BatchSizes) -> str:
    train, micro, accumulation = sizes
    ranks = train // (micro * accumulation)
    return f"\nA step has {micro} samples * {accumulation} forwards * {ranks} ranks = {train} samples."


def _answer(rows: list[Row], notices: tuple[str, ...], problems: list[str], sizes: BatchSizes | None) -> dict[str, Any]:
    return {
        "is_usable": not problems,
        "keys": [row._asdict() for row in rows],
        "notices": list(notices),
        "problems": problems,
        "batch": None if sizes is None else sizes._asdict(),
    }


def _print(name: str, rows: list[Row], notices: tuple[str, ...], problems: list[str]) -> None:
    _print_table([row for row in rows if row.outcome != "refused"])
    width = _width()
    for notice in notices:
        print(textwrap.fill(f"Note: {notice}.", width, subsequent_indent="  "))
    if problems:
        print(f"\n{name} cannot be used:")
        for problem in problems:
            print(textwrap.fill(f"- {problem}", width, subsequent_indent="  "))
        return
    autos = sum(row.outcome == "auto" for row in rows)
    print(f"\n{name} can be used" + (f", once {autos} keys that are auto are filled." if autos else "."))


def _print_table(rows: list[Row]) -> None:
    """Keys of a block stand below its name, and what is longer than a line goes on below itself."""
    names = [_in_block(row.key) for row in rows]
    columns = [names, [row.value for row in rows], [row.outcome for row in rows]]
    key, value, outcome = (max(map(len, column), default=0) for column in columns)
    indent = key + value + outcome + 6
    last_block = ""
    if rows:
        print(f"{'key':{key}}  {'value':{value}}  {'here':{outcome}}  what zeropg does")
    for name, row in zip(names, rows, strict=True):
        block = row.key.partition(".")[0] if "." in row.key else ""
        if block not in ("", last_block):
            print(block)
        last_block = block
        first, *rest = textwrap.wrap(row.does, max(40, _width() - indent), break_long_words=False)
        print(f"{name:{key}}  {row.value:{value}}  {row.outcome:{outcome}}  {first}")
        for line in rest:
            print(" " * indent + line)


def _in_block(key: str) -> str:
    return "  " + key.partition(".")[2] if "." in key else key


def _width() -> int:
    return min(_MOST_WIDTH, max(_LEAST_WIDTH, shutil.get_terminal_size().columns))


def _of_key(key: str) -> str:
    row = KEYS[key]
    return row.does if row.fate != "refused" else f"{row.because} {row.instead}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("config", _DESCRIPTION, _EXAMPLES, allow_abbrev=True)
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE", help="a DeepSpeed configuration")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks, to check the batch sizes (default: no check)"
    )
    parser.add_argument("--keys", action="store_true", help="print all keys, instead of reading a file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.keys == (options.config is not None):
        parser.error("expected a file, or --keys")
    if options.config is not None and not options.config.is_file():
        parser.error(f"{options.config} is no file")
    if options.world_size is not None and options.world_size < 1:
        parser.error(f"--world-size is {options.world_size}, expected at least 1")
    return options
