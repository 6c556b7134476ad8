"""`ConfigError`: what is wrong with a configuration."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration that cannot be used. Each line names a key, what it has, and what was expected or to use instead.

    problems: these lines.
    """

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        separator = "\n  - "
        text = self.problems[0] if len(self.problems) == 1 else separator.join(("", *self.problems))
        super().__init__(f"[zeropg] DeepSpeed config: {text}")
