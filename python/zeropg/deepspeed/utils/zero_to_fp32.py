"""DeepSpeed's `utils.zero_to_fp32`: fp32 weights of a checkpoint, DeepSpeed's or zeropg's, by its functions' names.

They run in one process: ranks need not call together.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from zeropg.deepspeed.checkpoints.folder import holds_deepspeed, tag_folder
from zeropg.deepspeed.checkpoints.read import read_contents
from zeropg.deepspeed.checkpoints.state_dict import read_state_dict
from zeropg.sharding.sharded_class import FullyShardedModule

Model = TypeVar("Model", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns whole tensors on the CPU by name, floating ones in fp32.

    Args:
        checkpoint_dir: the folder with `latest` and the tags' folders.
        tag: default: what `latest` names.
        exclude_frozen_parameters: of a checkpoint of DeepSpeed alone, since zeropg's do not say which were frozen.
        lazy_mode: without effect: the tensors have `.contiguous()`, as what DeepSpeed returns then.

    Raises FileNotFoundError, ValueError or OSError as engine.load_checkpoint does.
    """
    folder = tag_folder(Path(checkpoint_dir), tag)
    is_deepspeeds = holds_deepspeed(folder)
    if exclude_frozen_parameters and not is_deepspeeds:
        raise ValueError(
            f"[zeropg] zero_to_fp32: '{folder}' is a checkpoint of zeropg, which does not say which parameters were "
            "frozen; leave exclude_frozen_parameters out"
        )
    left_out = read_contents(folder, with_state=False).frozen if exclude_frozen_parameters else frozenset()
    found = read_state_dict(folder, is_deepspeeds=is_deepspeeds)
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in found.items()
        if name not in left_out
    }


def load_state_dict_from_zero_checkpoint(
    model: Model, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> Model:
    """Sets a model that is not sharded from a checkpoint; returns it on the CPU. Names that do not fit are left out.

    Raises ValueError for a model that is sharded, which engine.load_checkpoint sets.
    """
    if isinstance(model, FullyShardedModule):
        raise ValueError(
            "[zeropg] load_state_dict_from_zero_checkpoint: this model is sharded; call engine.load_checkpoint on all "
            "ranks, or pass a model that is not"
        )
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the files of `python -m zeropg zero_to_fp32`, in a process of its own.

    Raises RuntimeError with that command's words where it fails.
    """
    command = [sys.executable, "-m", "zeropg", "zero_to_fp32", os.fspath(checkpoint_dir), os.fspath(output_dir)]
    command += ["--max_shard_size", str(max_shard_size or "1000TB")]
    command += ["--safe_serialization"] if safe_serialization else []
    command += [] if tag is None else ["--tag", tag]
    command += ["--exclude_frozen_parameters"] if exclude_frozen_parameters else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"[zeropg] zero_to_fp32: {done.stderr.strip() or f'ended with {done.returncode}'}")
    print(done.stderr, end="", file=sys.stderr)  # warnings


if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "zeropg", "zero_to_fp32", *sys.argv[1:]]))
