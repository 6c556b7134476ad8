"""Tensors that outlive the call that makes them, whatever the mode of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def normal_tensors() -> Iterator[None]:
    """What is made inside can be written later, also where the caller evaluates under torch.inference_mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
