"""What stands for numpy's classes in pickles: arrays and numbers of plain numeric dtypes come out, and nothing else.

numpy's own `__setstate__` trust what they are given: flags of a dtype make it follow pointers that a file contains.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import numpy as np

_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16)")


class NotPlainError(ValueError):
    """An array or number of numpy's that is refused."""


class _Dtype:
    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise NotPlainError(f"it holds numpy's dtype {code!r}, expected plain numbers")
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or state[1] not in ("<", ">", "|", "=") or any(state[2:5]):
            raise NotPlainError(f"it holds numpy's dtype {self._code!r} with fields, expected plain numbers")
        self._order = state[1]

    def of_numpy(self) -> np.dtype[Any]:
        return np.dtype(self._order + self._code)


class _Array(np.ndarray):
    """An array while it is unpickled; `as_arrays` makes numpy's own of it."""

    def __new__(cls) -> _Array:
        return super().__new__(cls, (0,))

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, values = state
        if not isinstance(dtype, _Dtype) or not isinstance(values, bytes):
            raise NotPlainError("it holds an array of objects, expected plain numbers")
        super().__setstate__((1, shape, dtype.of_numpy(), is_fortran, values))  # numpy checks the length


def _reconstruct(kind: Any, shape: Any, *_: Any) -> _Array:
    if kind is not _Array or shape != (0,):
        raise NotPlainError(f"it makes an array of shape {shape} without values")
    return _Array()


def _scalar(dtype: Any, value: Any) -> Any:
    if not isinstance(dtype, _Dtype) or not isinstance(value, bytes):
        raise NotPlainError("it holds one of numpy's numbers that is none")
    return np.frombuffer(value, dtype.of_numpy(), count=1)[0]


def _no_bytes() -> bytes:
    """An empty array's values, which pickles make by a call of `bytes`."""
    return b""


STAND_INS: list[tuple[Any, str]] = [
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    (_no_bytes, "builtins.bytes"),
    *((_reconstruct, f"numpy.{package}.multiarray._reconstruct") for package in ("core", "_core")),
    *((_scalar, f"numpy.{package}.multiarray.scalar") for package in ("core", "_core")),
]


def as_arrays(content: Any) -> Any:
    """Returns what a pickle holds with numpy's own arrays; containers are changed in place."""
    return _as_arrays(content, set())


def _as_arrays(content: Any, seen: set[int]) -> Any:
    if isinstance(content, _Array):
        return content.view(np.ndarray)
    if type(content) is tuple:
        return tuple(_as_arrays(value, seen) for value in content)
    if id(content) in seen:
        return content
    seen.add(id(content))
    if isinstance(content, argparse.Namespace):
        _as_arrays(vars(content), seen)
    elif isinstance(content, dict):
        for key, value in content.items():
            content[key] = _as_arrays(value, seen)
    elif isinstance(content, list):
        content[:] = [_as_arrays(value, seen) for value in content]
    return content
