"""Checksums of a file's chunks from what its writers tell, however they share the bytes."""

from __future__ import annotations

import json
import random

import pytest

from zeropg._native import _C
from zeropg.rank_io.checksums import joined, told

CHUNK = 64


def expected(data: bytes) -> list[int]:
    return [_C.crc32c(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]


def pieces_of(data: bytes, start: int, stop: int) -> list[tuple[int, int, int]]:
    """As the writer of a file keeps them: cut where chunks end."""
    pieces = []
    while start < stop:
        end = min(stop, (start // CHUNK + 1) * CHUNK)
        pieces.append((start, end, _C.crc32c(data[start:end])))
        start = end
    return pieces


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_cut_give_the_files_checksums(seed: int) -> None:
    rng = random.Random(seed)
    size, writers = rng.choice([1, 63, 64, 65, 1000, 1024]), rng.choice([1, 2, 3, 4, 7])
    data = rng.randbytes(size)
    shortest, longest = rng.choice([(1, 5), (1, 200), (3, 3), (200, 300)])
    own: list[list[tuple[int, int, int]]] = [[] for _ in range(writers)]
    at, turn = 0, 0
    while at < size:
        stop = min(size, at + rng.randint(shortest, longest))
        own[turn % writers if seed % 2 else rng.randrange(writers)] += pieces_of(data, at, stop)
        at, turn = stop, turn + 1
    for pieces in own:
        rng.shuffle(pieces)
    messages = [json.loads(json.dumps(told(pieces, CHUNK, size))) for pieces in own]
    assert joined(messages, CHUNK, size) == expected(data)


def test_a_writer_of_columns_tells_one_number_for_a_chunk() -> None:
    data = random.Random(0).randbytes(100 * CHUNK)
    own = [[], []]
    for at in range(0, len(data), 4):
        own[at // 4 % 2] += pieces_of(data, at, at + 4)
    messages = [told(pieces, CHUNK, len(data)) for pieces in own]
    assert all(len(json.dumps(message)) < 100 * 8 + 100 for message in messages)
    assert joined(messages, CHUNK, len(data)) == expected(data)


def test_a_writer_of_all_tells_no_more_than_a_run() -> None:
    data = bytes(3 * CHUNK + 5)
    message = told(pieces_of(data, 0, len(data)), CHUNK, len(data))
    assert message.keys() == {"pieces"}
    assert [entry[:2] for entry in message["pieces"]] == [[0, len(data)]]


@pytest.mark.parametrize("step", [4, CHUNK])
def test_what_nobody_or_more_than_one_has_written_is_an_error(step: int) -> None:
    data = random.Random(1).randbytes(4 * CHUNK)
    own = [[], []]
    for at in range(0, len(data), step):
        own[at // step % 2] += pieces_of(data, at, at + step)
    missing = [told(own[0], CHUNK, len(data)), told(own[1][:-1], CHUNK, len(data))]
    twice = [told(own[0], CHUNK, len(data)), told([*own[1], own[0][0]], CHUNK, len(data))]
    for messages in (missing, twice):
        with pytest.raises(ValueError, match="written"):
            joined(messages, CHUNK, len(data))
