"""From a dictionary to a `Config`, with errors that name the key and what is near to it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from zeropg.deepspeed.config.blocks.section import Section
from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.model import Config


def validate(config: dict[str, Any]) -> Config:
    """Returns the configuration. Raises ConfigError with a line for each key that is unknown or has a wrong value."""
    try:
        return Config.model_validate(config)
    except ValidationError as error:
        raise ConfigError([_problem(one) for one in error.errors()]) from None


def key_paths(section: type[Section] = Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path of each key that has a value of its own ("zero_optimization.stage") and its default."""
    for name, field in section.model_fields.items():
        block = section_of(field.annotation)
        if block is None:
            yield path + name, field.get_default(call_default_factory=True)
        else:
            yield from key_paths(block, f"{path}{name}.")


def section_of(annotation: Any) -> type[Section] | None:
    """The block that an annotation names, None where it names none."""
    is_union = get_origin(annotation) in (Union, UnionType)
    candidates = get_args(annotation) if is_union else (annotation,)
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Section)), None)


def _problem(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_nearest(path)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path} is {error['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(path: str) -> str:
    """A known key of the same block, or else of any block, whose name is near to the last part of `path`."""
    block, _, name = path.rpartition(".")
    known = [known for known, _ in key_paths()]
    blocks = {key.rpartition(".")[0] for key in known}
    known += sorted(blocks - {""})
    beside = [key for key in known if key.rpartition(".")[0] == block]
    for choices, cutoff in ((known, 1.0), (beside, 0.6), (known, 0.8)):
        by_name = {key.rpartition(".")[2]: key for key in reversed(choices)}
        if found := difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff):
            return f"; did you mean {by_name[found[0]]!r}?"
    return "; python -m zeropg config --keys lists those that there are"
