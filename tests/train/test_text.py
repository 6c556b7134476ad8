"""The text, its split, and the order of reading: same bytes for every number of ranks."""

from __future__ import annotations

import sys

import pytest
import torch

from zeropg.tools.train.text import (
    IGNORED,
    TrainingBatches,
    clean_text,
    load_text,
    split_text,
    validation_batches,
)

DATA = torch.arange(250, dtype=torch.uint8)


def batches_of(rank: int, world_size: int, *, data: torch.Tensor = DATA, batch: int = 12) -> TrainingBatches:
    return TrainingBatches(data, context=10, batch=batch, seed=3, rank=rank, world_size=world_size)


def test_text_ships_with_python_and_is_english():
    text = load_text()
    assert len(text.training) > 200_000
    assert len(text.validation) == pytest.approx(len(text.training) / 9, rel=1e-3)
    assert bytes(text.training.tolist()).count(b" the ") > 1000


def test_missing_text_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"no pydoc_data\.topics.*use a full CPython"):
        load_text()


def test_cleaning_drops_underlines_and_repeated_paragraphs():
    topics = {"b": "Title\n*****\n\nSaid  twice,\nonce wrapped.", "a": "Said twice, once\nwrapped.\n\n   code = 1"}
    assert clean_text(topics) == "Said twice, once\nwrapped.\n\n   code = 1\n\nTitle"


def test_split_is_by_position():
    text = split_text("abcdefghij", validation_share=0.2)
    assert bytes(text.training.tolist()) == b"abcdefgh"
    assert bytes(text.validation.tolist()) == b"ij"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_global_batch_does_not_depend_on_the_world_size(world_size):
    alone = batches_of(0, 1)
    ranks = [batches_of(rank, world_size) for rank in range(world_size)]
    for step in range(7):
        parts = [rank.at(step) for rank in ranks]
        for whole, part in zip(alone.at(step), zip(*parts, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(part))


def test_each_epoch_reads_every_window_once_and_shifted_by_one_for_targets():
    batches = batches_of(0, 1, data=DATA[:110], batch=10)  # 10 windows: one step is one epoch
    firsts = []
    for epoch in range(3):
        inputs, targets = batches.at(epoch)
        assert torch.equal(targets, inputs + 1)
        assert len(set(inputs[:, 0].tolist())) == 10
        assert int(inputs.max()) - int(inputs.min()) == 99  # the windows touch, none overlap
        firsts.append(inputs[:, 0].tolist())
    assert firsts[0] != firsts[1] != firsts[2]


def test_a_step_can_be_read_again():
    batches = batches_of(0, 1)
    first = batches.at(0)[0]
    batches.at(50)
    assert torch.equal(first, batches.at(0)[0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [2, 11, 12, 100, 250])
def test_validation_predicts_each_byte_once_in_equal_batches(world_size, length):
    ranks = [
        validation_batches(DATA[:length], context=10, batch=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    predicted = []
    for batches in ranks:
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (3, 10)
            assert torch.equal(inputs[targets != IGNORED] + 1, targets[targets != IGNORED])
            predicted += targets[targets != IGNORED].tolist()
    assert sorted(predicted) == DATA[1:length].tolist()


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="global batch of 12 windows does not divide by 5 ranks"):
        batches_of(0, 5)


def test_context_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match="15 bytes of text hold no window of context 10"):
        batches_of(0, 1, data=DATA[:15])
