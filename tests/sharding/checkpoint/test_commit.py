"""The commit: stopped at any point, the directory holds the older export, the new one, or (never here) nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zeropg.rank_io.commit import INDEX_NAME, SINGLE_NAME, commit, temporary_name, write_small_file


class Stopped(BaseException):
    """The process dies here."""


def shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def stage(directory: Path, token: str, version: str, count: int) -> dict:
    """Writes temporary files whose content names the version; returns commit's arguments."""
    weights = shard_names(count)
    for name in weights:
        write_small_file(directory / temporary_name(token, name), version.encode())
    if count > 1:
        index = {"metadata": {}, "weight_map": {f"tensor{n}": name for n, name in enumerate(weights)}}
        write_small_file(directory / temporary_name(token, INDEX_NAME), json.dumps(index).encode())
    return {"companions": [], "weights": weights, "has_index": count > 1}


def read(directory: Path) -> set[str]:
    """Reads as transformers does: returns the versions of all weight files that a reader would open."""
    if (directory / SINGLE_NAME).exists():
        return {(directory / SINGLE_NAME).read_text()}
    if not (directory / INDEX_NAME).exists():
        return set()
    index = json.loads((directory / INDEX_NAME).read_text())
    return {(directory / name).read_text() for name in index["weight_map"].values()}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Lets `step` changes of the directory happen, then dies instead of the next one."""
    left = [step]

    def counted(original):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Stopped
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    for name in ("replace", "link"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr("zeropg.rank_io.commit.write_small_file", counted(write_small_file))


def commits_that_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], dict]
) -> Iterator[Path]:
    """Yields the directory of a commit that died at its first step, then at its second …; the last one ran to its end.

    prepare: given the empty directory, returns the arguments of the commit, whose token is "b".
    """
    for step in range(100):
        directory = tmp_path / str(step)
        directory.mkdir()
        arguments = prepare(directory)
        is_finished = False
        with monkeypatch.context() as patch, contextlib.suppress(Stopped):
            stop_at(patch, step)
            commit(directory, "b", **arguments)
            is_finished = True
        yield directory
        if is_finished:
            return
    raise AssertionError("a commit takes more than 100 steps")


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("old", [0, 1, 2, 3])
def test_a_death_at_any_step_leaves_a_whole_export(tmp_path, monkeypatch, old, new):
    def prepare(directory):
        if old:
            commit(directory, "a", **stage(directory, "a", "old", old))
            assert read(directory) == {"old"}
        return stage(directory, "b", "new", new)

    seen = []
    for directory in commits_that_die(tmp_path, monkeypatch, prepare):
        seen.append(read(directory))
        # Whatever was left behind, the next export works and cleans up.
        commit(directory, "c", **stage(directory, "c", "next", new))
        assert read(directory) == {"next"}
        left = {path.name for path in directory.iterdir() if not path.name.endswith(".tmp")}
        assert left == set(shard_names(new)) | ({INDEX_NAME} if new > 1 else set())
    before = {"old"} if old else set()
    switch = seen.index({"new"})
    assert seen == [before] * switch + [{"new"}] * (len(seen) - switch)


def test_without_hard_links_no_mixture_is_ever_complete(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "no links here")

    def prepare(directory):
        commit(directory, "a", **stage(directory, "a", "old", 3))
        return stage(directory, "b", "new", 3)

    monkeypatch.setattr(os, "link", refuse)
    for directory in commits_that_die(tmp_path, monkeypatch, prepare):
        assert len(read(directory)) <= 1
    assert read(directory) == {"new"}


def test_a_damaged_older_index_does_not_stop_an_export(tmp_path):
    for content in (
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        "[" * 100000,
        '{"weight_map": {"a": "../x"}}',
    ):
        (tmp_path / INDEX_NAME).write_text(content)
        commit(tmp_path, "a", **stage(tmp_path, "a", "new", 2))
        assert read(tmp_path) == {"new"}


def test_foreign_files_stay(tmp_path):
    for name in ("model-1-of-2.safetensors", "tokenizer.json", "adapter_model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_text("x")
    before = {path.name for path in tmp_path.iterdir()}
    commit(tmp_path, "a", **stage(tmp_path, "a", "new", 1))
    assert {path.name for path in tmp_path.iterdir()} == before | {SINGLE_NAME}
