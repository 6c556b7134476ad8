"""Files of torch.save, read by torch's weights-only unpickler: a pickle gets data, and runs nothing."""

from __future__ import annotations

import pickle
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch


class Inert:
    """Stands for an instance of a class that is not needed: it has its attributes and no code of its own."""


# Classes whose instances DeepSpeed saves (and Megatron, in the client state), and what stands in their place.
_STAND_INS: dict[str, type] = {
    "argparse.Namespace": Inert,
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
            return torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        found = next((match for pattern in _REFUSED if (match := pattern.search(str(error)))), None)
        if isinstance(error, pickle.UnpicklingError) and found is not None:
            raise ValueError(
                f"'{path}' is refused: its pickle asks for {found[1]}, which is no data and no class that DeepSpeed "
                "saves, so it could run code; none of it was run"
            ) from error
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"'{path}' is cut off or damaged ({reason[:200]}): copy it again") from error


@cache
def _allowed() -> list[Any]:
    return [*((stand_in, name) for name, stand_in in _STAND_INS.items()), *_numpy_data()]


def _numpy_data() -> list[Any]:
    """What pickles of numpy's arrays and numbers name; it makes data only."""
    try:
        import numpy as np
    except ImportError:
        return []
    core: Any = getattr(np, "_core", getattr(np, "core", None))  # numpy 2, numpy 1
    made = [
        (getattr(core.multiarray, name), f"numpy.{package}.multiarray.{name}")
        for name in ("_reconstruct", "scalar")
        for package in ("core", "_core")
    ]
    dtypes = [value for name, value in vars(np.dtypes).items() if name.endswith("DType") and isinstance(value, type)]
    return [np.ndarray, np.dtype, *made, *dtypes]
