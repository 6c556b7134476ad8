"""`python -m zeropg logs`: what all ranks of a run have written, in one text."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from zeropg.tools.command_line import make_parser
from zeropg.tools.logs.failure import first_traceback
from zeropg.tools.logs.folder import Growing, LogError, lines_of, logs_in
from zeropg.tools.logs.merge import Line, merged, shown_ranks
from zeropg.tools.run.cores import parse_cpu_list

_DESCRIPTION = """
Shows the logs of all ranks of a run as one text: what `python -m zeropg run --log_dir DIR` has written, DIR/rank0.log
and so on. A line that several ranks say is shown once, with these ranks in front; below them stands the traceback of
the rank that failed first.
"""
_EXAMPLES = """
examples:
  python -m zeropg run --num_gpus 4 --log_dir logs train.py      a run that writes logs
  python -m zeropg logs logs                                     all that its ranks said, and who failed first
  python -m zeropg logs logs --failure                           only that
  python -m zeropg logs logs --tail 20 --rank 0,2-3              the last lines of three ranks
  python -m zeropg logs logs --grep 'loss|nan'                   lines that match a regular expression of Python's
  python -m zeropg logs logs --follow                            go on with what comes, until Ctrl-C

what it looks like:
  [0-3] step 10
  [0]   loss 2.31
  [2]   Traceback (most recent call last):

Lines carry no times. Each rank's stay in their order; between ranks the lines that they share say what came when. Who
failed first goes by the times of the files: the rank with a traceback whose log ended first. A rank that was killed has
no traceback; python -m zeropg run names it at its end.

status: 0 shown; 1 nothing that can be shown; 2 wrong options
"""
_POLL_SECONDS = 0.3


def main(arguments: list[str]) -> int:
    """Show what `arguments` ask for; returns the exit status."""
    options = _parse(arguments)
    try:
        logs = logs_in(options.directory, options.rank)
        if options.follow:
            _follow(logs, options)
            return 0
        if not options.failure:
            _print(
                _last(merged({rank: _matching(lines_of(path), options) for rank, path in logs.items()}), options), logs
            )
        if options.failure or options.grep is None:
            _print_failure(logs, options.failure)
    except LogError as error:
        print(f"zeropg logs: {error}.", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 0 if options.follow else 130
    return 0


def _follow(logs: dict[int, Path], options: argparse.Namespace) -> None:
    growing = {rank: Growing(path) for rank, path in logs.items()}
    is_first = True
    while True:
        lines = merged({rank: list(_matching(file.new_lines(), options)) for rank, file in growing.items()})
        _print(_last(lines, options) if is_first else lines, logs)
        sys.stdout.flush()
        is_first = False
        time.sleep(_POLL_SECONDS)


def _matching(lines: Iterable[str], options: argparse.Namespace) -> Iterator[str]:
    return (line for line in lines if options.grep is None or options.grep.search(line))


def _last(lines: Iterable[Line], options: argparse.Namespace) -> Iterable[Line]:
    return lines if options.tail is None else deque(lines, maxlen=options.tail)


def _print(lines: Iterable[Line], logs: Iterable[int]) -> None:
    width = len(shown_ranks(logs)) + 2
    for line in lines:
        print(f"{f'[{shown_ranks(line.ranks)}]':{width}} {line.text}")


def _print_failure(logs: dict[int, Path], is_asked_for: bool) -> None:
    found = first_traceback(logs)
    if found is not None:
        print(("" if is_asked_for else "\n") + f"rank {found.rank} failed first ({logs[found.rank]}):")
        left_out = len(found.lines) - len(found.last_lines)
        if left_out:
            print(f"  ... {left_out} lines above")
        for line in found.last_lines:
            print(f"  {line}")
    elif is_asked_for:
        raise LogError(f"no traceback of rank {shown_ranks(logs)}; a rank that was killed leaves none")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("logs", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("directory", type=Path, metavar="DIR", help="what --log_dir was")
    parser.add_argument("--rank", metavar="LIST", help="only these ranks: 0,2 or 4-7 (default: all)")
    parser.add_argument("--grep", metavar="REGEX", help="only lines in which this is found")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines of what would be shown")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    parser.add_argument("--failure", action="store_true", help="only which rank failed first, and its traceback")
    options = parser.parse_args(arguments)
    if options.tail is not None and options.tail < 1:
        parser.error(f"--tail is {options.tail}, expected at least 1")
    if options.failure and (options.follow or options.tail is not None or options.grep is not None):
        parser.error("--failure goes with --rank only")
    try:
        options.rank = None if options.rank is None else parse_cpu_list(options.rank)
    except ValueError:
        parser.error(f"--rank is {options.rank!r}; expected ranks like 0,2 or ranges like 4-7, each once")
    try:
        options.grep = None if options.grep is None else re.compile(options.grep)
    except re.error as error:
        parser.error(f"--grep is {options.grep!r}, no regular expression: {error}")
    return options
