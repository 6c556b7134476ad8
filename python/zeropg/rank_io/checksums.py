"""CRC-32C checksums of the chunks of a file from what each of its writers has written. No communication.

A writer tells of the chunks that it has written in one piece the piece's checksum. Where it wrote several pieces of a
chunk, such as columns of a matrix, it tells one number all the same: the checksum that the chunk would have with zeros
in place of what others wrote. Checksums of chunks that are zero where the others are not add up, bit by bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from zeropg._native import _C

Piece = tuple[int, int, int]  # first byte, end, CRC-32C; inside one chunk
# What a writer tells of a file, as JSON: of pieces that follow each other [first byte, end, their checksums as text];
# of chunks that follow each other [number of the first, bytes written in them, their checksums as text].
Told = dict[str, list[list[Any]]]


def told(pieces: Sequence[Piece], chunk_bytes: int, file_bytes: int) -> Told:
    """What a writer tells of the pieces that it has written."""
    whole: list[list[Any]] = []
    scattered: list[list[Any]] = []
    for chunk, group in groupby(sorted(pieces), key=lambda piece: piece[0] // chunk_bytes):
        own = list(group)
        if all(before[1] == after[0] for before, after in pairwise(own)):
            for start, stop, crc in own:
                if whole and whole[-1][1] == start and start % chunk_bytes == 0:
                    whole[-1][1] = stop
                    whole[-1][2] += f"{crc:08x}"
                else:
                    whole.append([start, stop, f"{crc:08x}"])
            continue
        written = sum(stop - start for start, stop, _ in own)
        text = f"{_among_zeros(own, chunk, chunk_bytes, file_bytes):08x}"
        if scattered and scattered[-1][0] + len(scattered[-1][2]) // 8 == chunk:
            scattered[-1][1] += written
            scattered[-1][2] += text
        else:
            scattered.append([chunk, written, text])
    return {"pieces": whole, **({"scattered": scattered} if scattered else {})}


def joined(everybodys: Sequence[Told], chunk_bytes: int, file_bytes: int) -> list[int]:
    """The checksum of each chunk. Raises ValueError where the writers have not written every byte once."""
    pieces = [piece for each in everybodys for piece in _pieces(each, chunk_bytes)]
    scattered: dict[int, list[int]] = defaultdict(list)
    written = sum(stop - start for start, stop, _ in pieces)
    for first, count, text in (entry for each in everybodys for entry in each.get("scattered", ())):
        written += count
        for at in range(0, len(text), 8):
            scattered[first + at // 8].append(int(text[at : at + 8], 16))
    if not scattered:
        return _C.join_checksums(pieces, file_bytes, chunk_bytes)
    if written != file_bytes:
        raise ValueError(f"{written} of {file_bytes} bytes were written")
    others: list[Piece] = []
    for piece in pieces:
        chunk = piece[0] // chunk_bytes
        if chunk in scattered:
            scattered[chunk].append(_among_zeros([piece], chunk, chunk_bytes, file_bytes))
        else:
            others.append(piece)
    for chunk, checksums in scattered.items():
        start, stop = _bounds(chunk, chunk_bytes, file_bytes)
        # Of an even number of summands, the constant that every checksum has cancels out.
        total = 0 if len(checksums) % 2 else _of_zeros(stop - start)
        for checksum in checksums:
            total ^= checksum
        others.append((start, stop, total))
    return _C.join_checksums(others, file_bytes, chunk_bytes)


def _pieces(own: Told, chunk_bytes: int) -> Iterator[Piece]:
    """The inverse of what `told` makes: pieces end where chunks do."""
    for start, stop, text in own["pieces"]:
        for at in range(0, len(text), 8):
            end = min(stop, (start // chunk_bytes + 1) * chunk_bytes)
            yield start, end, int(text[at : at + 8], 16)
            start = end


def _among_zeros(pieces: Sequence[Piece], chunk: int, chunk_bytes: int, file_bytes: int) -> int:
    """The checksum of a chunk that has these pieces, in order, and zeros elsewhere."""
    begin, end = _bounds(chunk, chunk_bytes, file_bytes)
    filled: list[Piece] = []
    at = begin
    for start, stop, crc in (*pieces, (end, end, 0)):
        if start > at:
            filled.append((at - begin, start - begin, _of_zeros(start - at)))
        if stop > start:
            filled.append((start - begin, stop - begin, crc))
        at = stop
    return _C.join_checksums(filled, end - begin, chunk_bytes)[0]


def _bounds(chunk: int, chunk_bytes: int, file_bytes: int) -> tuple[int, int]:
    return chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, file_bytes)


@lru_cache(maxsize=1024)
def _of_zeros(count: int) -> int:
    return _C.crc32c(bytes(count))
