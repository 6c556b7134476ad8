"""State tensors whose entries are blocks of codes: reading and writing elements of them.

`sharding/optim/state_format.h` says what the entries are. Outside of an optimizer such state is bfloat16, one value per
element, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zeropg._native import _C

_BLOCK = _C.state_block
_PIECE = 1 << 20  # elements: what a read unpacks at once


def pieces_of(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts [start, stop) so that a piece takes little memory; an empty range is one piece."""
    yield start, min(stop, start + _PIECE)
    for begin in range(start + _PIECE, stop, _PIECE):
        yield begin, min(stop, begin + _PIECE)


def entry_range(slot: _C.StateSlot, start: int, stop: int) -> tuple[int, int]:
    """Returns the range of entries of the blocks that elements [start, stop) lie in."""
    return slot.entries(start - start % _BLOCK), slot.entries(stop) if start < stop else slot.entries(start)


def elements_of(slot: _C.StateSlot, entries: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns elements [start, stop) as bfloat16; entries: those of `entry_range`, on the CPU."""
    if start >= stop:
        return torch.empty(0, dtype=torch.bfloat16)
    first = start % _BLOCK
    return slot.unpack(entries.contiguous(), first + stop - start)[first:]


def with_elements(slot: _C.StateSlot, entries: torch.Tensor, start: int, values: torch.Tensor) -> torch.Tensor:
    """Returns the entries with elements from `start` on replaced by `values`, [numel], rounded to the nearest.

    entries: whole blocks, from the one on in which `start` lies, as many as `values` touch.
    """
    first = start % _BLOCK
    # The last block of a range is kept whole, so what follows the values in it is there, or zero.
    whole = slot.unpack(entries.contiguous(), entries.numel() // slot.entries(1) * _BLOCK).float()
    whole[first : first + values.numel()] = values
    return slot.pack(whole)
