"""From a file, a text or a dictionary to a dictionary."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from zeropg.deepspeed.config.error import ConfigError

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


def load(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration as a dictionary of its own.

    Texts may have comments and commas after the last entry, as DeepSpeed's own reader (of HJSON) allows.

    Raises ConfigError for a file that is not there, and for what is no JSON object or says a key twice.
    """
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return parse(config, "the text")
    if not isinstance(config, str | Path):
        raise ConfigError([f"got a {type(config).__name__}; expected a path, JSON in base64, or a dictionary"])
    if _is_file(config):
        try:
            return parse(Path(config).read_text(encoding="utf-8"), str(config))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{config}: cannot be read: {error}"]) from error
    return parse(_from_base64(str(config)), "the text in base64")


def parse(text: str, origin: str) -> dict[str, Any]:
    """Returns the object that a text describes; errors say that it came from `origin`."""
    plain = _COMMENT.sub(lambda found: found[1] or " ", text)
    plain = _LAST_COMMA.sub(lambda found: found[1] or "", plain)
    try:
        config = json.loads(plain, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        lines = plain.rstrip().splitlines() or [""]
        number = min(error.lineno, len(lines))  # the error may lie behind the last line
        raise ConfigError(
            [f"{origin}: no JSON in line {number}: {error.msg}: {lines[number - 1].strip()!r}"]
        ) from error
    if not isinstance(config, dict):
        raise ConfigError([f"{origin}: has a {type(config).__name__}; expected an object: {{...}}"])
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ConfigError([f"{', '.join(map(repr, twice))} is there more than once in one block; expected it once"])
    return dict(pairs)


def _is_file(name: str | Path) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a text that is too long for a name
        return False


def _from_base64(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, ValueError) as error:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ConfigError(
            [f"{shown!r} is no file, nor JSON in base64; expected one of them, or a dictionary"]
        ) from error
