"""`python -m zeropg logs`: shows what the ranks of `python -m zeropg run --log_dir` wrote, as one text."""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeropg.tools.command_line import make_parser
from zeropg.tools.logs.failure import LAST_LINES, report, symptoms
from zeropg.tools.logs.files import Line, RankFile, format_ranks, parse_ranks, rank_files
from zeropg.tools.logs.merge import SIGHT, merge
from zeropg.tools.run.rank_output import go_on_without
from zeropg.tools.run.record import read_record

_POLL_SECONDS = 0.2

_DESCRIPTION = f"""
Shows the logs of all ranks as one text, from the folder that `python -m zeropg run --log_dir DIR` wrote. A line that
several ranks wrote is shown once, with their numbers in front:

  [0-3] epoch 1
  [0] loss 1.2
  [1] loss 1.3

Logs have no times. Lines of one rank stay in their order; those of different ranks are put together where they are
equal, if fewer than {SIGHT} lines lie between; else ranks take turns. It is one pass in little memory, of any size.
"""
_EXAMPLES = """
examples:
  python -m zeropg run --num_gpus 4 --log_dir logs train.py    writes the logs
  python -m zeropg logs logs                                   all ranks as one text
  python -m zeropg logs logs --rank 0,2-3 --tail 20            the last 20 lines of three ranks
  python -m zeropg logs logs --grep 'loss|grad_norm'           lines that a regular expression of Python's finds
  python -m zeropg logs logs --follow --tail 0                 what is written from now on, until Ctrl-C
  python -m zeropg logs logs --failure                         who failed first, why, and its last lines

--failure goes by what the run noted in DIR/run.json. Where that is missing, or the run was killed, it is the rank with
a traceback or a fatal signal whose log was the first to end; copy logs with their times (cp -p).

status: 0 shown; 1 --failure found one; 2 wrong options, or nothing to show; 130 Ctrl-C
"""


def main(arguments: list[str]) -> int:
    """Show what `arguments` ask for; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.failure and (options.ranks is not None or options.pattern is not None):
        parser.error("--failure looks at all ranks and lines; leave out --rank and --grep")
    _allow_a_file_for_each_rank()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show all letters
    try:
        files = _files(options)
        if options.failure:
            return _show_failure(options, files)
        _show(options, files)
        sys.stdout.flush()
    except KeyboardInterrupt:
        go_on_without(sys.stdout)  # of lines that still wait nobody wants more
        return 130
    except BrokenPipeError:
        go_on_without(sys.stdout)  # whoever read has enough: `| head`
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _files(options: argparse.Namespace) -> list[RankFile]:
    """Of the ranks that are asked for. Raises ValueError where there are none, OSError where they cannot be read."""
    folder: Path = options.folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; expected the one that zeropg run --log_dir wrote")
    found = rank_files(folder, read_record(folder))
    if options.follow:
        return [file for file in found if options.ranks is None or file.rank in options.ranks]
    if not found:
        raise ValueError(f"{folder} has no logs (rank0.log ...); expected the folder that zeropg run --log_dir wrote")
    missing = sorted((options.ranks or set()) - {file.rank for file in found})
    if missing:
        ranks = format_ranks([file.rank for file in found])
        raise ValueError(f"{folder} has no log of rank {format_ranks(missing)}; it has those of {ranks}")
    return [file for file in found if options.ranks is None or file.rank in options.ranks]


def _allow_a_file_for_each_rank() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _show_failure(options: argparse.Namespace, files: Sequence[RankFile]) -> int:
    lines = LAST_LINES if options.tail is None else options.tail
    has_failed, said = report(read_record(options.folder), [symptoms(file, lines) for file in files])
    try:
        print("\n".join(said), flush=True)
    except BrokenPipeError:
        go_on_without(sys.stdout)
    return int(has_failed)


def _show(options: argparse.Namespace, files: Sequence[RankFile]) -> None:
    _print_merged(options, files, is_final=not options.follow, last=options.tail)
    known = {file.rank: file for file in files}
    try:
        while options.follow:
            time.sleep(_POLL_SECONDS)
            for file in _files(options):
                known.setdefault(file.rank, file)
            # One that is gone may come again.
            _print_merged(options, [file for file in known.values() if file.path.exists()], is_final=False, last=None)
    except KeyboardInterrupt:
        _print_merged(options, list(known.values()), is_final=True, last=None)
        raise


def _print_merged(options: argparse.Namespace, files: Sequence[RankFile], *, is_final: bool, last: int | None) -> None:
    texts = [(file.rank, _wanted(file.lines(is_final), options.pattern, last)) for file in files]
    for ranks, line in merge(texts):
        sys.stdout.write(f"[{format_ranks(ranks)}] {line}\n")
    if options.follow:
        sys.stdout.flush()


def _wanted(lines: Iterator[Line], pattern: re.Pattern[str] | None, last: int | None) -> Iterator[Line]:
    """Those that the pattern finds, and of these the last ones."""
    found = lines if pattern is None else (line for line in lines if pattern.search(line.text))
    return found if last is None else iter(deque(found, maxlen=last))


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _ranks(text: str) -> set[int]:
    try:
        return parse_ranks(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines; expected 0 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("logs", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what zeropg run --log_dir wrote")
    parser.add_argument("--rank", dest="ranks", type=_ranks, metavar="LIST", help="only these ranks: 0,2-3")
    parser.add_argument(
        "--grep", dest="pattern", type=_regex, metavar="REGEX", help="only lines in which this is found"
    )
    parser.add_argument(
        "--tail", type=_count, metavar="N", help="only the last N lines of each rank, of those that --grep leaves"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-f", "--follow", action="store_true", help="go on with what is written, by new ranks too")
    how.add_argument(
        "--failure", action="store_true", help=f"who failed first, and its last lines ({LAST_LINES}, or --tail)"
    )
    return parser
