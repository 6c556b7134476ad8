"""All tensors of a model in a checkpoint, for functions of the program that load them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from zeropg.checkpoint.saved_tensors import SavedTensors
from zeropg.deepspeed.checkpoints.read import read_contents


def read_state_dict(folder: Path, *, is_deepspeeds: bool) -> dict[str, torch.Tensor]:
    """Returns whole tensors on the CPU under all their names: masters in fp32, buffers as they are.

    Raises FileNotFoundError, ValueError or OSError as load_checkpoint does.
    """
    found: dict[str, torch.Tensor] = {}
    if is_deepspeeds:
        contents = read_contents(folder, with_state=False)
        for name, stored in contents.tensors.items():
            shape = torch.Size(stored.shape)
            found[name] = _joined(shape, stored.dtype, stored.pieces(0, shape.numel()))
        aliases = contents.aliases
    else:
        saved = SavedTensors(folder)
        try:
            for name, tensor in saved.tensors.items():
                found[name] = _joined(torch.Size(tensor.shape), tensor.dtype, saved.pieces(name))
        finally:
            saved.close()
        aliases = saved.aliases
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}


def _joined(shape: torch.Size, dtype: torch.dtype, pieces: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    flat = whole.view(-1)
    for start, values in pieces:
        flat[start : start + values.numel()] = values
    return whole
