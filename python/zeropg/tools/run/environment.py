"""The variables that ranks on other hosts get from the shell that starts them, and from files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# Beginnings of names. DeepSpeed passes MLFLOW, PYTHON, MV2, UCX, NCCL, LD_LIBRARY_PATH and PATH.
PASSED = (
    "ZEROPG_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "TORCH",
    "PYTHON",
    "OMP_",
    "MKL_",
    "HF_",
    "MLFLOW",
    "LD_LIBRARY_PATH",
    "PATH",
)
# They say what one host is: with the same value on all of them, zeropg would take them for one.
OF_ONE_HOST = ("ZEROPG_HOST_ID", "ZEROPG_RACK_ID", "ZEROPG_DOMAIN_ID")
# How somebody reached the launcher, which is not how the launcher reached a host.
_OF_A_CONNECTION = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
# torchrun's own, of a run that this one may have been started in.
_OF_ANOTHER_RUN = "TORCHELASTIC_"
_NO_GPUS = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES; the last is slurm's

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")


def to_pass(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of `environment` that goes to all hosts."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED) and name not in OF_ONE_HOST and not name.startswith(_OF_ANOTHER_RUN)
    }


def of_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for a program that reaches a host: srun hands all of its own on."""
    return {name: value for name, value in environment.items() if name not in (*OF_ONE_HOST, *_OF_A_CONNECTION)}


def environment_files(environment: Mapping[str, str]) -> list[Path]:
    """The files that DeepSpeed reads where they exist: .deepspeed_env, at home and here; DS_ENV_FILE renames it."""
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    return [path for path in (Path.home() / name, Path(name)) if path.is_file()]


def read_environment_files(paths: Iterable[Path]) -> dict[str, str]:
    """Returns the variables of files with lines NAME=VALUE; what a later file says counts.

    A value is taken as it stands, but for quotes around all of it. Raises ValueError with the line, where one is
    something else or is a variable that can only be right on one host.
    """
    found = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            parts = _ASSIGNMENT.fullmatch(text)
            if parts is None:
                raise ValueError(f"{path}, line {number}: {text!r}; expected NAME=VALUE")
            name, value = parts[1], parts[2]
            if name in OF_ONE_HOST:
                raise ValueError(f"{path}, line {number}: {name} is of one host; set it in that host's own profile")
            if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
            found[name] = value
    return found


def visible_gpus(granted: str | None, slots: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for these slots of a host, whose own is `granted`: slots count what it names.

    Without one they are the GPUs' own numbers; where it names no GPU it stays as it is. Raises ValueError for a slot
    that it lacks.
    """
    if granted is None:
        return ",".join(map(str, slots))
    names = [name.strip() for name in granted.split(",")]
    if names[0] in _NO_GPUS:
        return granted
    if absent := [slot for slot in slots if slot >= len(names)]:
        raise ValueError(
            f"slot {absent[0]} is asked for, but CUDA_VISIBLE_DEVICES={granted} grants {len(names)} GPUs, slots 0 to "
            f"{len(names) - 1}; give the slots of the hostfile accordingly"
        )
    return ",".join(names[slot] for slot in slots)
