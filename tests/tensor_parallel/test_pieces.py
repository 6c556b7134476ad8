"""Flat ranges of a part of a tensor, and where they lie in the whole one: against torch's indexing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from zeropg.tensor_parallel.pieces import Cut


def cuts(*dims: list[tuple[int, int, int]]) -> list[Cut]:
    """By dimension (size, offset, size of the part)."""
    return [Cut(*(tuple(values) for values in zip(*each, strict=True))) if each else _SCALAR for each in product(*dims)]


_SCALAR = Cut((), (), ())
# A size with parts of it: all, the first, one in the middle, the last that is shorter, none, and none at the end.
FIVE = [(5, 0, 5), (5, 0, 2), (5, 2, 2), (5, 4, 1), (5, 3, 0), (5, 5, 0)]
THREE = [(3, 0, 3), (3, 0, 1), (3, 1, 2), (3, 3, 0)]
ONE = [(1, 0, 1), (1, 1, 0)]
CUTS = [
    _SCALAR,
    *cuts(FIVE),
    *cuts(FIVE, THREE),
    *cuts(THREE, FIVE),
    *cuts(THREE, FIVE, THREE),
    *cuts(ONE, THREE, FIVE),
    *cuts(THREE, ONE, THREE),
    *cuts([(0, 0, 0)], THREE),
    *cuts(THREE[:2], [(2, 0, 2), (2, 1, 1)], THREE[:3], [(2, 0, 2), (2, 0, 1)]),
]


def whole_of(cut: Cut) -> torch.Tensor:
    return torch.arange(torch.Size(cut.shape).numel()).view(cut.shape)


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    yield from ((start, stop) for start in range(numel + 1) for stop in range(start, numel + 1))


def test_runs_are_the_elements_of_the_part() -> None:
    for cut in CUTS:
        own = cut.of(whole_of(cut)).reshape(-1)
        assert own.numel() == torch.Size(cut.sizes).numel()
        for start, stop in ranges(own.numel()):
            local, whole = [], []
            for runs in cut.runs(start, stop):
                assert runs.numel > 0
                assert runs.repeats > 0
                for i in range(runs.repeats):
                    local += range(runs.local + i * runs.numel, runs.local + (i + 1) * runs.numel)
                    whole += range(runs.whole + i * runs.stride, runs.whole + i * runs.stride + runs.numel)
            assert local == list(range(start, stop)), (cut, start, stop)
            assert whole == own[start:stop].tolist(), (cut, start, stop)


def test_a_tensor_that_is_not_cut_is_one_run() -> None:
    cut = Cut((4, 5), (0, 0), (4, 5))
    assert cut.is_whole
    assert [tuple(runs) for runs in cut.runs(3, 17)] == [(3, 3, 14, 1, 0)]


def test_whole_columns_are_one_entry() -> None:
    cut = Cut((1000, 8), (0, 4), (1000, 2))
    assert [tuple(runs) for runs in cut.runs(0, 2000)] == [(0, 4, 2, 1000, 8)]
    assert cut.neighbours(0, 2000) is None
    assert cut.neighbours(2, 4) == 12


def test_rows_are_neighbours_in_the_whole() -> None:
    cut = Cut((6, 5), (2, 0), (3, 5))
    assert cut.neighbours(0, 15) == 10
    assert cut.neighbours(4, 11) == 14
    assert cut.neighbours(4, 4) is None


@pytest.mark.parametrize("piece", [1, 4, 7, 1000])
@pytest.mark.parametrize("most_gap", [0, 2, 1 << 16])
def test_a_read_gives_the_part_whatever_pieces_the_source_has(
    piece: int, most_gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeropg.tensor_parallel.pieces._MOST_GAP", most_gap)
    for cut in CUTS:
        flat = whole_of(cut).reshape(-1)
        own = cut.of(whole_of(cut)).reshape(-1)

        def source(start: int, stop: int, flat: torch.Tensor = flat) -> Iterator[tuple[int, torch.Tensor]]:
            assert start < stop
            for at in range(start, stop, piece):
                yield at, flat[at : min(at + piece, stop)]

        for start, stop in ranges(own.numel()):
            at = start
            for first, values in cut.read(source, start, stop):
                assert first == at
                assert torch.equal(values, own[at : at + values.numel()])
                at += values.numel()
            assert at == stop


def test_a_read_leaves_out_what_lies_far_between(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, asked = Cut((3, 10), (0, 2), (3, 4)), []

    def source(start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        asked.append((start, stop))
        yield start, torch.arange(start, stop)

    list(cut.read(source, 0, 12))
    assert asked == [(2, 26)]
    asked.clear()
    monkeypatch.setattr("zeropg.tensor_parallel.pieces._MOST_GAP", 5)
    list(cut.read(source, 0, 12))
    assert asked == [(2, 6), (12, 16), (22, 26)]


def test_a_part_is_picked_out_of_any_range_of_the_whole() -> None:
    for cut in CUTS:
        flat = whole_of(cut).reshape(-1)
        own = cut.of(whole_of(cut)).reshape(-1).tolist()
        for first, last in ranges(flat.numel()):
            picked = [(at, values.tolist()) for at, values in cut.pick(first, flat[first:last])]
            assert [v for _, values in picked for v in values] == [v for v in own if first <= v < last]
            assert all(own[at : at + len(values)] == values for at, values in picked)


def test_a_part_is_put_into_the_whole() -> None:
    for cut in CUTS:
        own = cut.of(whole_of(cut)).reshape(-1)
        for start, stop in ranges(own.numel()):
            whole = torch.full((torch.Size(cut.shape).numel(),), -1)
            cut.put(whole, start, own[start:stop])
            written = (whole >= 0).nonzero().flatten()
            assert torch.equal(written, own[start:stop])
            assert torch.equal(whole[written], written)
