"""Nested values as JSON and tensors: what checkpoints take instead of pickles.

`encode` makes JSON of dicts, lists, tuples, None, booleans, numbers and text; tensors and numpy arrays are handed to
the caller, who says what stands in their place. What JSON cannot say is an object with one key that begins with "$".
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from zeropg._native import _C

_MAX_DEPTH = 100
_EXPECTED = "expected nested dicts, lists and tuples of None, bool, int, float, str, tensors and numpy arrays"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Keep = Callable[[str, torch.Tensor], Any]  # (path, a detached tensor of a dtype that safetensors has) -> JSON


def encode(value: Any, path: str, keep: Keep) -> Any:
    """Returns JSON for `value`.

    Args:
        path: how messages call the value; grows by "['key']" and "[index]".
        keep: is called with each tensor (and array, as a tensor); what it returns stands in the tensor's place.

    Raises:
        TypeError: something that has no JSON; the message names its path and type.
    """
    return _encode(value, path, keep, 0)


def _encode(value: Any, path: str, keep: Keep, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise TypeError(f"{path} is nested deeper than {_MAX_DEPTH}, or contains itself; {_EXPECTED}")
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _encode_float(float(value))
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, keep)
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [_encode(item, f"{path}[{i}]", keep, depth + 1) for i, item in enumerate(value)]}
    if type(value) is list:
        return [_encode(item, f"{path}[{i}]", keep, depth + 1) for i, item in enumerate(value)]
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_dict(value, path, keep, depth)
    return _encode_numpy(value, path, keep)


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def _encode_tensor(value: torch.Tensor, path: str, keep: Keep) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        raise TypeError(f"{path} is a {type(value).__name__} with layout {value.layout}, expected a plain dense tensor")
    if value.is_meta:
        raise TypeError(f"{path} is a tensor on device meta, which has no values")
    if not _has_format(value.dtype):
        raise TypeError(f"{path} is a tensor of {value.dtype}, which safetensors has not; convert it first")
    return keep(path, value.detach())


@cache
def _has_format(dtype: torch.dtype) -> bool:
    try:
        _C.plan_layout(names=["x"], shapes=[[]], dtypes=[dtype], max_file_bytes=1, stem="x", metadata={})
    except ValueError:
        return False
    return True


def _encode_dict(value: Mapping[Any, Any], path: str, keep: Keep, depth: int) -> Any:
    items = []
    for key, item in value.items():
        if not (key is None or isinstance(key, (bool, int, float, str))):
            raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}, expected text or a number")
        items.append((key, _encode(item, f"{path}[{key!r}]", keep, depth + 1)))
    if type(value) is Counter:
        return {"$counter": [[_encode(key, path, keep, depth), item] for key, item in items]}
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return {str(key): item for key, item in items}
    return {"$dict": [[_encode(key, path, keep, depth), item] for key, item in items]}


def _encode_numpy(value: Any, path: str, keep: Keep) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and isinstance(value.item(), (bool, int, float, str)):
        return _encode(value.item(), path, keep, 0)
    if numpy is not None and type(value) is numpy.ndarray:
        try:
            tensor = torch.from_numpy(numpy.ascontiguousarray(value).reshape(value.shape))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{path} is an array of {value.dtype}, which tensors do not have; convert it") from error
        return {"$array": _encode_tensor(tensor, path, keep)}
    kind = type(value)
    raise TypeError(f"{path} is a {kind.__module__}.{kind.__qualname__}, {_EXPECTED}")


def decode(value: Any, fetch: Callable[[Any], torch.Tensor]) -> Any:
    """The inverse of `encode`. Raises ValueError for what `encode` does not make.

    fetch: returns the tensor for what `keep` had returned.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, fetch) for key, item in value.items()}
    content = value[tag]
    if len(value) == 1 and isinstance(content, list):
        if tag == "$tuple":
            return tuple(decode(item, fetch) for item in content)
        if tag in ("$dict", "$counter") and all(isinstance(item, list) and len(item) == 2 for item in content):
            pairs = {_key(decode(key, fetch)): decode(item, fetch) for key, item in content}
            return Counter(pairs) if tag == "$counter" else pairs
    if len(value) == 1 and tag == "$float" and content in _FLOATS:
        return _FLOATS[content]
    if len(value) == 1 and tag == "$array":
        return fetch(content).numpy()
    if len(value) == 1 and tag == "$tensor":
        return fetch(value)
    raise ValueError(f"{json.dumps(value)[:200]} is nothing that this version of zeropg writes")


def _key(key: Any) -> Any:
    if isinstance(key, (dict, list)):
        raise ValueError(f"{key!r} cannot be a dictionary's key")
    return key


def keep_scalar(path: str, tensor: torch.Tensor) -> Any:
    """A `keep` for JSON alone: takes tensors of one element without dimensions."""
    if tensor.dim() != 0 or tensor.is_complex():
        raise TypeError(f"{path} is a tensor of shape {list(tensor.shape)}, expected a number")
    number = tensor.item()
    return {"$tensor": [dtype_name(tensor.dtype), _encode_float(number) if isinstance(number, float) else number]}


def fetch_scalar(kept: Any) -> torch.Tensor:
    """The inverse of `keep_scalar`."""
    content = kept["$tensor"]
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError(f"{content!r} is no number with a dtype")
    return torch.tensor(decode(content[1], fetch_scalar), dtype=dtype_of(content[0]))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: Any) -> torch.dtype:
    """Returns the dtype of this name. Raises ValueError."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
