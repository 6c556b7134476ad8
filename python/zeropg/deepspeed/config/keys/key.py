"""`Key`: what becomes of one key of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["honoured", "mapped", "no effect", "refused"]


def no_value(value: Any) -> bool:
    return False


def any_value(value: Any) -> bool:
    return True


def what_is_on(value: Any) -> bool:
    """Whether a block, or a flag, asks for something: an empty block and one with "enabled": false do not."""
    if not isinstance(value, Mapping):
        return bool(value)
    return bool(value) and value.get("enabled") not in (False, "auto")


@dataclass(frozen=True)
class Key:
    """A row of the registry.

    fate: "honoured": it means what it means in DeepSpeed; "mapped": zeropg's own means do what it asks for, or what is
      at least as exact; "no effect": nothing here hangs on it, and no result either; "refused": there is nothing like
      it here.
    does: a sentence: what zeropg does with it, or why it has no effect.
    refuses: the values, other than the default, that are refused.
    because, instead: sentences: why they are, and what to use.
    """

    fate: Fate
    does: str
    refuses: Callable[[Any], bool] = no_value
    because: str = ""
    instead: str = ""


def honoured(does: str) -> Key:
    return Key("honoured", does)


def mapped(does: str, *, refuses: Callable[[Any], bool] = no_value, because: str = "", instead: str = "") -> Key:
    return Key("mapped", does, refuses, because, instead)


def no_effect(does: str) -> Key:
    return Key("no effect", does)


def refused(because: str, *, instead: str, refuses: Callable[[Any], bool] = any_value) -> Key:
    return Key("refused", "This value asks for nothing.", refuses, because, instead)
