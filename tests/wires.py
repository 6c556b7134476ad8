"""The wires between nodes that this build has, for tests that every one of them must pass."""

from __future__ import annotations

import importlib.util

from zeropg._native import _C


def missing_library(name: str) -> str:
    """Why the wire cannot be used here: the package with its library is not installed. Where it is, it must work."""
    wheel = _C.wires()[name]
    return f"the package {wheel} is not installed" if wheel and importlib.util.find_spec(wheel) is None else ""


WIRES = sorted(_C.wires())
USABLE_WIRES = [name for name in WIRES if not missing_library(name)]
