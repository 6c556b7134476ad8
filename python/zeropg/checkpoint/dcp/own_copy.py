"""Nested values that are no tensors of the model, as DCP takes them."""

from __future__ import annotations

import copy
from typing import Any

import torch


def own_copy(value: Any, path: str) -> Any:
    """Returns a deep copy, since DCP loads into what it gets.

    path: how messages call the value.

    Raises TypeError for a dict with keys that are no text: DCP makes text of them and does not find them again.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"{path} has the key {key!r}; torch.distributed.checkpoint makes text of it and does not find it "
                    "again: use text as keys, or zeropg.save_checkpoint"
                )
        return {key: own_copy(item, f"{path}[{key!r}]") for key, item in value.items()}
    if type(value) is list:
        return [own_copy(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return copy.deepcopy(value)
