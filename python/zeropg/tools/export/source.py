"""What an export reads: the weights of one checkpoint, ours or DeepSpeed's, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from zeropg.checkpoint.manifest import MANIFEST_NAME
from zeropg.checkpoint.match import listed
from zeropg.checkpoint.saved_tensors import SavedTensors
from zeropg.deepspeed.checkpoints.contents import Contents
from zeropg.deepspeed.checkpoints.folder import holds_deepspeed, tag_folder
from zeropg.deepspeed.checkpoints.read import read_contents


class Described(Protocol):
    """A whole tensor, unread."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Source(Protocol):
    """Weights by name. aliases: other names of tied ones. left_out: names of parameters that were not saved."""

    @property
    def tensors(self) -> Mapping[str, Described]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def left_out(self) -> Sequence[str]: ...
    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values), 4 MiB at a time; each is valid until the next."""

    def close(self) -> None: ...


class DeepSpeedSource:
    """The weights of one of DeepSpeed's: fp32 where it has masters, else as the model computed."""

    def __init__(self, folder: Path) -> None:
        self.contents: Contents = read_contents(folder, with_state=False)
        self.tensors = self.contents.tensors
        self.aliases = self.contents.aliases
        self.left_out: tuple[str, ...] = ()  # which DeepSpeed does not say

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        stored = self.tensors[name]
        yield from stored.pieces(0, torch.Size(stored.shape).numel())

    def close(self) -> None:
        """Nothing is open: files are mapped, and let go with the tensors."""


@dataclass(frozen=True)
class Found:
    """A checkpoint's folder, and the folders in which a model's config.json may stand beside it."""

    folder: Path
    is_deepspeeds: bool
    around: tuple[Path, ...]


def find(checkpoint: Path, tag: str | None) -> Found:
    """Says which checkpoint a path means: a folder of zeropg.save_checkpoint, of an engine (with tags), or DeepSpeed's.

    Raises:
        FileNotFoundError: there is none; the message says what is there instead.
        ValueError: both zeropg and DeepSpeed have saved into the folder.
    """
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"'{checkpoint}' is no directory")
    if tag is None and not holds_deepspeed(checkpoint) and (checkpoint / MANIFEST_NAME).is_file():
        return Found(checkpoint, False, (checkpoint, checkpoint.parent))
    folder = tag_folder(checkpoint, tag)
    return Found(folder, holds_deepspeed(folder), (folder, folder.parent))


def warn_of_left_out(source: Source, command: str) -> None:
    """Says on stderr what an export cannot have."""
    if source.left_out:
        print(
            f"[zeropg] {command}: warning: {listed(list(source.left_out))} were frozen and left out at the save "
            "(exclude_frozen): they are missing in what is written",
            file=sys.stderr,
        )


def open_source(found: Found) -> Source:
    """Opens a checkpoint. Raises FileNotFoundError, ValueError or OSError as loading it does."""
    return DeepSpeedSource(found.folder) if found.is_deepspeeds else SavedTensors(found.folder)
