"""The text, its split, and the order in which a run reads it.

The text is `pydoc_data.topics`: the language reference that ships with every CPython for `help()`. One byte is one
token. Who reads what depends on the seed and the step, never on the number of ranks.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # target that cross_entropy leaves out: padding of the last window

_UNDERLINE = re.compile(r"^[*=~^\"-]{3,}$\n?", re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """The two parts of the text, as uint8 tensors of bytes."""

    training: Tensor
    validation: Tensor


def load_text(validation_share: float = 0.1) -> Text:
    """Read the text and keep its last `validation_share` for validation.

    Raises RuntimeError if this Python comes without `pydoc_data` (some minimal distributions strip it).
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that train learns from (some minimal distributions strip "
            "it); use a full CPython: python.org's, or Debian's python3"
        ) from error
    return split_text(clean_text(topics), validation_share)


def clean_text(topics: dict[str, str]) -> str:
    """Join the topics in the order of their names, without heading underlines and without repeated paragraphs.

    The topics quote each other at length ("compound" holds all of "while"). A paragraph kept twice could stand on both
    sides of the split, and the validation loss would measure memory.
    """
    seen: set[str] = set()
    paragraphs: list[str] = []
    for name in sorted(topics):
        for paragraph in _UNDERLINE.sub("", topics[name]).split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                paragraphs.append(paragraph.strip("\n"))
    return "\n\n".join(paragraphs)


def split_text(text: str, validation_share: float) -> Text:
    """Cut `text` by position: the last `validation_share` of its bytes is the validation part."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    boundary = round(len(data) * (1 - validation_share))
    return Text(training=data[:boundary], validation=data[boundary:])


class TrainingBatches:
    """Global batches of training windows, and the part of each that one rank reads.

    Each epoch cuts the text into windows of `context` bytes from a random first byte, and shuffles them. The same
    seed gives the same global batch at the same step for every `world_size`: rank r takes rows
    `[r * batch / world_size, (r + 1) * batch / world_size)` of it.
    """

    def __init__(self, data: Tensor, *, context: int, batch: int, seed: int, rank: int, world_size: int) -> None:
        if batch % world_size != 0:
            raise ValueError(f"the global batch of {batch} windows does not divide by {world_size} ranks")
        # One byte more for the last target, and up to `context - 1` bytes before the epoch's first window.
        self._windows = (len(data) - context) // context
        if self._windows < 1:
            raise ValueError(f"{len(data)} bytes of text hold no window of context {context}; take a smaller context")
        self._data = data
        self._context = context
        self._batch = batch
        self._seed = seed
        self._rows = range(rank * batch // world_size, (rank + 1) * batch // world_size)
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets of `step`, counted from 0: `[batch / world_size, context]`, int64."""
        starts = [self._start(step * self._batch + row) for row in self._rows]
        windows = torch.stack([self._data[start : start + self._context + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def _start(self, window: int) -> int:
        epoch, place = divmod(window, self._windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            first = torch.randint(self._context, (1,), generator=generator)
            self._starts = first + self._context * torch.randperm(self._windows, generator=generator)
            self._epoch = epoch
        return int(self._starts[place])


def validation_batches(
    data: Tensor, *, context: int, batch: int, rank: int, world_size: int
) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the whole validation part, as batches of inputs and targets, `[batch, context]` int64.

    Each byte but the first is predicted once. The windows are dealt out in turn, and filled up with IGNORED targets, so
    that every rank has the same number of equal batches: ranks may fetch sharded parameters together.
    """
    count = len(data) - 1
    if count < 1:
        raise ValueError(f"{len(data)} bytes of validation text: at least 2 are needed")
    windows = -(-count // context)
    windows_per_rank = -(-windows // world_size)
    batches_per_rank = -(-windows_per_rank // batch)
    rows = batches_per_rank * batch * world_size
    inputs = torch.zeros(rows * context, dtype=torch.int64)
    targets = torch.full((rows * context,), IGNORED, dtype=torch.int64)
    inputs[:count] = data[:-1].long()
    targets[:count] = data[1:].long()
    mine = range(rank, rows, world_size)
    return [
        (inputs.view(rows, context)[list(part)], targets.view(rows, context)[list(part)])
        for part in (mine[start : start + batch] for start in range(0, len(mine), batch))
    ]
