"""The parser of a command's line: what all commands have alike."""

from __future__ import annotations

import argparse
from typing import Any


def make_parser(command: str, description: str, examples: str | None = None, **more: Any) -> argparse.ArgumentParser:
    """Returns a parser whose help shows `description` and `examples` as they are written.

    command: behind `python -m zeropg`. more: arguments of argparse.ArgumentParser. Options must be written out unless
      allow_abbrev=True.
    """
    arguments: dict[str, Any] = {
        "prog": f"python -m zeropg {command}",
        "description": description,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    return argparse.ArgumentParser(**arguments | more)
