"""Loads the compiled core `_C`, after checking that it was built for the torch and the Python that are running.

c10d has no stable binary interface: a core built for another minor version of torch would crash later, far from the
cause. So the versions are compared before the library is loaded.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_REMEDY = "reinstall zeropg for this environment (`make` in a checkout, or the wheel whose name says {wheel})"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _check_versions() -> None:
    """Raises ImportError saying what was built, what is installed and what to do."""
    try:
        from zeropg._built_for import TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            f"zeropg in {Path(__file__).parent} has no compiled core: this is a source folder, not an installation; "
            "run `make build` and put build/torch-<version>/python on PYTHONPATH, or install the wheel of `make wheel`"
        ) from None
    remedy = _REMEDY.format(wheel=f"+torch{_minor(torch.__version__)}")
    if _minor(TORCH_VERSION) != _minor(torch.__version__):
        raise ImportError(
            f"zeropg was built for torch {TORCH_VERSION}, but torch {torch.__version__} is installed, and c10d has no "
            f"stable binary interface between minor versions; {remedy}, or install torch {_minor(TORCH_VERSION)}.*"
        )
    package = Path(__file__).parent
    if not any((package / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        built = ", ".join(sorted(path.name for path in package.glob("_C*.so"))) or "none"
        raise ImportError(
            f"zeropg has no compiled core for Python {sys.version_info.major}.{sys.version_info.minor} "
            f"(found: {built}); {remedy}"
        )


_check_versions()

import zeropg._C as _C  # noqa: E402  (only after the check)

__all__ = ["_C"]
