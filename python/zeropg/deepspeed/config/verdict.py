"""`verdicts`: what becomes of each key that a configuration sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zeropg.deepspeed.config.blocks.section import Section
from zeropg.deepspeed.config.keys import KEYS, Fate
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.config.validate import key_paths

_WORDS = {"True": "true", "False": "false", "None": "null"}
Outcome = Fate | Literal["not asked for"]


@dataclass(frozen=True)
class Verdict:
    """What becomes of one key.

    outcome: as `Key.fate`; "not asked for": a value of a key that is refused, which asks for nothing.
    does: a sentence; where the value is refused, why. instead: what to use then, else "".
    """

    key: str
    value: Any
    outcome: Outcome
    is_default: bool
    does: str
    instead: str = ""

    @property
    def problem(self) -> str:
        """The sentence for errors of a key that is refused."""
        return f"{self.key} is {shown(self.value)}, which is refused: {self.does} {self.instead}"


def verdicts(config: Config) -> list[Verdict]:
    """Returns a verdict for each key that the configuration sets, in the order of the registry."""
    defaults = dict(key_paths())
    return [_verdict(name, value, defaults[name]) for name in KEYS for value in _set_value(config, name)]


def shown(value: Any) -> str:
    """A value as JSON writes it, cut to a line."""
    text = _WORDS.get(repr(value), repr(value).replace("'", '"'))
    return text if len(text) <= 40 else text[:37] + "..."


def _verdict(name: str, value: Any, default: Any) -> Verdict:
    row = KEYS[name]
    is_default = value == default
    if not is_default and row.refuses(value):
        return Verdict(name, value, "refused", False, row.because, row.instead)
    return Verdict(name, value, "not asked for" if row.fate == "refused" else row.fate, is_default, row.does)


def _set_value(config: Config, name: str) -> tuple[Any, ...]:
    """The value of a key in a tuple; () where the configuration does not set it."""
    *blocks, last = name.split(".")
    section: Section = config
    for block in blocks:
        if block not in section.model_fields_set:
            return ()
        section = getattr(section, block)
    return (getattr(section, last),) if last in section.model_fields_set else ()
