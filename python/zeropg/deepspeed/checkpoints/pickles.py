"""Files of torch.save, read by torch's weights-only unpickler: a pickle gets data, and runs nothing."""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

try:
    from zeropg.deepspeed.checkpoints import numpy_data
except ImportError:  # without numpy there is nothing to make of its data
    numpy_data = None  # type: ignore[assignment]


class Inert:
    """Stands for an instance of a class that is not needed: it has its attributes and no code of its own."""


# Classes whose instances DeepSpeed saves, and what stands in their place.
_STAND_INS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}
_REFUSED = (re.compile(r"GLOBAL (\S+) was not"), re.compile(r"unsupported GLOBAL (\S+) whose"))


def read_pickle(path: Path) -> Any:
    """Returns what a file of torch.save holds; tensors are mapped, and read from the disk where they are used.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut off or damaged; or its pickle asks for a class that is not data, which the message names.
    """
    is_archive = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(_allowed()):
            content = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
        return content if numpy_data is None else numpy_data.as_arrays(content)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        found = next((match for pattern in _REFUSED if (match := pattern.search(str(error)))), None)
        if isinstance(error, pickle.UnpicklingError) and found is not None:
            raise ValueError(
                f"'{path}' is refused: its pickle asks for {found[1]}, which is no data and no class that DeepSpeed "
                "saves, so it could run code; none of it was run"
            ) from error
        if numpy_data is not None and isinstance(error, numpy_data.NotPlainError):
            raise ValueError(f"'{path}' is refused: {error}; none of it was run") from error
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"'{path}' is cut off or damaged ({reason[:200]}): copy it again") from error


@cache
def _allowed() -> list[Any]:
    stand_ins = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
    return [argparse.Namespace, *stand_ins, *(numpy_data.STAND_INS if numpy_data is not None else ())]
