"""The arguments of the command line that DeepSpeed's scripts take."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds --deepspeed and --deepspeed_config to a parser, and returns it; `initialize(args)` reads the second."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; initialize does not read it")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="DeepSpeed's configuration, JSON")
    return parser
