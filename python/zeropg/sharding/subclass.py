"""Classes that take the place of a user's own, under its name."""

from __future__ import annotations

from typing import Any

from torch import nn


def subclass_of(cls: type[nn.Module], *mixins: type[nn.Module], **attributes: Any) -> type[nn.Module]:
    """Returns a subclass of the mixins and `cls`, in this order, with the name, module and docstring of `cls`."""
    made = type(cls.__name__, (*mixins, cls), {"__doc__": cls.__doc__, **attributes})
    made.__qualname__, made.__module__ = cls.__qualname__, cls.__module__
    return made
