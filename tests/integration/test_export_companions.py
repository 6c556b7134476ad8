"""The commit of an export with config.json: stopped at any point, no configuration stands beside other weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharding.checkpoint.test_commit import commits_that_die, read, shard_names, stage
from zeropg.rank_io.commit import INDEX_NAME, SINGLE_NAME, commit, temporary_name, write_small_file


def stage_with_config(directory: Path, token: str, version: str, count: int, config: str) -> dict:
    write_small_file(directory / temporary_name(token, "config.json"), config.encode())
    return {**stage(directory, token, version, count), "companions": ["config.json"]}


def read_all(directory: Path) -> set[tuple[str, str]]:
    """The version of each weight file, with the configuration beside it."""
    config = directory / "config.json"
    return {(version, config.read_text() if config.exists() else "") for version in read(directory)}


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("old", [0, 1, 2, 3])
@pytest.mark.parametrize("configs", [("same", "same"), ("wide", "narrow"), ("", "narrow")])
def test_a_death_at_any_step_leaves_weights_with_their_configuration(tmp_path, monkeypatch, old, new, configs):
    def prepare(directory):
        if old:
            commit(directory, "a", **stage(directory, "a", "old", old))
            if configs[0]:
                (directory / "config.json").write_text(configs[0])
        return stage_with_config(directory, "b", "new", new, configs[1])

    seen = []
    for directory in commits_that_die(tmp_path, monkeypatch, prepare):
        seen.append(read_all(directory))
        # Whatever was left behind, the next export works and cleans up.
        commit(directory, "c", **stage_with_config(directory, "c", "next", new, "next"))
        assert read_all(directory) == {("next", "next")}
        left = {path.name for path in directory.iterdir() if not path.name.endswith(".tmp")}
        assert left == {*shard_names(new), "config.json"} | ({INDEX_NAME} if new > 1 else set())
    before, after = {("old", configs[0])} if old else set(), {("new", configs[1])}
    first, last = seen.index(after), len(seen) - seen[::-1].index(before) if before in seen else 0
    between = [set()] * (first - last)
    assert seen == [before] * last + between + [after] * (len(seen) - first)
    assert not (between and configs[0] == configs[1]), "the older export went although nothing changes"


def test_a_file_that_readers_prefer_goes_last(tmp_path, monkeypatch):
    """After a death between the rename of a single file and the removal of an older index, both are there."""

    def prepare(directory):
        commit(directory, "a", **stage(directory, "a", "oldest", 2))
        (directory / SINGLE_NAME).write_text("old")
        (directory / "config.json").write_text("wide")
        return stage_with_config(directory, "b", "new", 2, "narrow")

    for directory in commits_that_die(tmp_path, monkeypatch, prepare):
        assert read_all(directory) in ({("old", "wide")}, set(), {("new", "narrow")})
    assert read_all(directory) == {("new", "narrow")}


def test_a_configuration_that_does_not_change_is_left_alone(tmp_path):
    commit(tmp_path, "a", **stage_with_config(tmp_path, "a", "old", 1, "same"))
    before = (tmp_path / "config.json").stat()
    commit(tmp_path, "b", **stage_with_config(tmp_path, "b", "new", 1, "same"))
    assert (tmp_path / "config.json").stat().st_ino == before.st_ino
    assert {path.name for path in tmp_path.iterdir()} == {SINGLE_NAME, "config.json"}
