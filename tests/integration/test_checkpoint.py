"""save_checkpoint and load_checkpoint on real ranks and real files: what is in them, and what comes back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integration.checkpoint_zoo import (
    MANIFEST,
    Zoo,
    assert_failed,
    attempt,
    everything,
    load,
    loaded_seed,
    make,
    names,
    same,
    save,
    try_save,
)
from tests.spawn import run_ranks

load_file = pytest.importorskip("safetensors.torch").load_file


# What is in the files.


def save_in_every_way(directory: Path) -> None:
    for stage in range(4):
        expected = save(directory / str(stage), seed=stage, stage=stage)
        if dist.get_rank() == 0:
            torch.save(expected, directory / f"{stage}.pt")


def load_in_every_way(directory: Path) -> None:
    for stage in range(4):
        expected = torch.load(directory / f"{stage}.pt")
        found = load(directory / str(stage), stage=3 - stage)
        assert int(found.pop("seed")) == stage
        assert same(found, expected), [k for k in expected if not torch.equal(found[k], expected[k])]


def test_every_kind_of_tensor_comes_back_and_the_files_are_plain_safetensors(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(2)
    pool.run(save_in_every_way, tmp_path)
    pool.run(load_in_every_way, tmp_path)
    (data,) = (tmp_path / "2").glob("data-*")
    expected = torch.load(tmp_path / "2.pt")
    tensors = load_file(data / "model.safetensors") | load_file(data / "optimizer.safetensors")
    assert "embed.weight" in tensors and "head.weight" not in tensors and "scratch" not in tensors
    for name, value in tensors.items():
        assert torch.equal(value, expected[name]) and value.dtype == expected[name].dtype, name
    assert {name for name in expected if name.endswith("/exp_avg")} <= tensors.keys()
    manifest = json.loads((tmp_path / "2" / MANIFEST).read_text())["manifest"]
    assert manifest["aliases"] == {"head.weight": "embed.weight"} and manifest["world_size"] == 2
    assert manifest["origin"]["stage"] == 2 and "scale" in manifest["origin"]["placements"]["whole, from rank 0"]
    for path in [tmp_path / "2" / MANIFEST, *data.iterdir()]:
        assert path.stat().st_mode & 0o777 == 0o600
    assert not any(b"\x80\x04" in path.read_bytes()[:2] for path in data.iterdir())


def mixed_precision(directory: Path) -> None:
    import zeropg

    model, optimizer = make(2, 1, param_dtype=torch.bfloat16, steps=0)
    zeropg.save_checkpoint(directory, model, optimizer)
    masters = everything(model)
    assert masters["embed.weight"].dtype == torch.float32 and model.embed.weight.dtype == torch.bfloat16
    for options in ({"param_dtype": torch.bfloat16}, {}):
        other, _ = make(3, 2, steps=0, **options)
        zeropg.load_checkpoint(directory, other)
        assert same(everything(other), masters)
        with zeropg.full_parameters(other):
            assert torch.equal(other.embed.weight.float(), masters["embed.weight"].to(other.embed.weight.dtype).float())
    double = zeropg.fully_shard(Zoo(3).double(), stage=1)
    zeropg.load_checkpoint(directory, double)
    assert torch.equal(everything(double)["embed.weight"], masters["embed.weight"].double())


def test_masters_are_what_is_saved_and_other_floating_dtypes_are_cast(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(mixed_precision, tmp_path)


def without_optimizer(directory: Path) -> None:
    import zeropg

    model, optimizer = make(seed=1)
    expected = everything(model)
    zeropg.save_checkpoint(directory / "model", model)
    zeropg.save_checkpoint(directory / "both", model, optimizer)
    other, optimizer = make(seed=2)
    before = everything(other, optimizer)
    assert zeropg.load_checkpoint(directory / "both", other) == (None, None)
    assert same(everything(other), expected)
    after = everything(other, optimizer)
    assert all(torch.equal(after[name], before[name]) for name in after if "/" in name)
    other, optimizer = make(seed=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        zeropg.load_checkpoint(directory / "model", other, optimizer)
    assert same(everything(other), expected)
    said = [str(w.message) for w in seen if "saved without an optimizer" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)


def test_the_optimizer_may_be_left_out_on_either_side(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(without_optimizer, tmp_path)


def load_with_other_ranks(directory: Path) -> None:
    import zeropg

    model, optimizer = make(seed=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        extra, rank_extra = zeropg.load_checkpoint(directory, model, optimizer)
    assert extra == {"seed": 0} and rank_extra == ([dist.get_rank()] if dist.get_rank() < 2 else None)
    assert sum("was saved by 2 ranks, now there are" in str(w.message) for w in seen) == (dist.get_rank() == 0)


def test_rank_extra_at_another_world_size_is_none_or_that_of_the_old_rank(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save, tmp_path)
    for world_size in (1, 3):
        run_ranks(world_size, load_with_other_ranks, tmp_path)


def whole_optimizer_state(_: Path) -> None:
    import zeropg

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    for stage in range(4):
        torch.manual_seed(0)
        model = zeropg.fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), stage=stage, units=["0"])
        optimizer = zeropg.shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
        for trained, stepper in ((model, optimizer), (plain, reference)) if stage == 0 else ((model, optimizer),):
            trained(torch.ones(2, 7)).square().sum().backward()
            stepper.step()
        full = zeropg.full_optimizer_state_dict(optimizer)
        if dist.get_rank() != 0:
            assert full == {}
            continue
        names = [name for name, _ in plain.named_parameters()]
        assert full["param_groups"][0]["params"] == names and full["param_groups"][0]["lr"] == 0.1
        for name, parameter in plain.named_parameters():
            assert full["state"][name].keys() == reference.state[parameter].keys()
            for key, value in reference.state[parameter].items():
                torch.testing.assert_close(full["state"][name][key], value, rtol=1e-5, atol=1e-7)


def test_the_whole_optimizer_state_has_the_users_names(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(whole_optimizer_state, tmp_path)


# Saving again, leftovers, several jobs.


def test_saving_again_replaces_and_leftovers_go(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(2)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "data-of-mine").mkdir()
    for seed in (1, 2):
        dead = tmp_path / f"data-{seed:016x}"
        dead.mkdir()
        (dead / "model.safetensors").write_bytes(b"half")
        (tmp_path / f".{MANIFEST}.tmp").write_text("half")
        pool.run(save, tmp_path, seed)
        assert loaded_seed(pool, tmp_path) == seed
        (data,) = tmp_path.glob("data-" + 16 * "?")
        assert names(tmp_path) == sorted(["data-of-mine", data.name, "notes.txt", MANIFEST])


def test_a_checkpoint_that_is_being_read_is_not_removed_and_may_be_moved(rank_pool: Any, tmp_path: Path) -> None:
    from zeropg.checkpoint.folder import reading

    pool = rank_pool(2)
    pool.run(save, tmp_path / "a", 1)
    (data,) = (tmp_path / "a").glob("data-*")
    with reading(data):
        pool.run(save, tmp_path / "a", 2)
        assert data.is_dir()
    (tmp_path / "a").rename(tmp_path / "b")
    assert loaded_seed(pool, tmp_path / "b") == 2
    pool.run(save, tmp_path / "b", 3)
    assert not (tmp_path / "b" / data.name).exists()


def load_while_another_saves(directory: Path) -> None:
    from zeropg.checkpoint import load as loading

    reading = loading.reading
    replaced: list[Path] = []

    def reading_late(data: Path) -> Any:
        if not replaced:
            replaced.append(data)
            (newer,) = (directory / "b").glob("data-*")
            newer.rename(directory / "a" / newer.name)
            (directory / "b" / MANIFEST).replace(directory / "a" / MANIFEST)
            shutil.rmtree(data)
        return reading(data)

    loading.reading = reading_late
    try:
        assert int(load(directory / "a", stage=1)["seed"]) == 2
    finally:
        loading.reading = reading
    assert len(replaced) == 1


def test_a_load_that_meets_a_save_takes_the_newer_checkpoint(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(1)
    pool.run(save, tmp_path / "a", 1)
    pool.run(save, tmp_path / "b", 2)
    pool.run(load_while_another_saves, tmp_path)


def save_beside_another(directory: Path) -> str:
    import zeropg.checkpoint.folder

    zeropg.checkpoint.folder._LOCK_SECONDS = 0.2
    return try_save(directory)


def test_two_jobs_do_not_save_into_one_directory(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        errors = run_ranks(2, save_beside_another, tmp_path)
    finally:
        os.close(descriptor)
    assert_failed(errors, "rank 0: another process is saving into", "give each job a directory of its own")
    assert names(tmp_path) == []


# Wrong arguments.


def wrong_arguments(directory: Path) -> None:
    import zeropg

    model, optimizer = make()
    rank = dist.get_rank()
    plain = nn.Linear(1, 1)
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: zeropg.save_checkpoint(directory, plain), ["ValueError", "not a sharded model"]),
        (
            lambda: zeropg.save_checkpoint(directory, model, torch.optim.SGD(plain.parameters())),
            ["TypeError", "expected what zeropg.shard_optimizer returned"],
        ),
        (
            lambda: zeropg.save_checkpoint(directory, model, make()[1]),
            ["ValueError", "the optimizer was sharded for another model"],
        ),
        (
            lambda: zeropg.save_checkpoint(directory, model, optimizer, extra={"a": [1, object()]}),
            ["TypeError", "rank 0: extra['a'][1] is a builtins.object", "expected nested dicts"],
        ),
        (
            lambda: zeropg.save_checkpoint(directory, model, rank_extra={1} if rank == 1 else None),
            ["TypeError", "rank 1: rank_extra is a builtins.set"],
        ),
        (
            lambda: zeropg.save_checkpoint(directory / str(rank), model),
            ["ValueError", "directory is", "ranks that differ: 1"],
        ),
        (
            lambda: zeropg.save_checkpoint(directory, model, optimizer if rank else None),
            ["ValueError", "optimizer is 'None' on rank 0", "AdamW"],
        ),
        (lambda: zeropg.save_checkpoint(directory, model, async_save="yes"), ["TypeError", "async_save is 'yes'"]),
        (lambda: zeropg.save_checkpoint(None, model), ["TypeError"]),
        (lambda: zeropg.load_checkpoint(directory, plain), ["ValueError", "not a sharded model"]),
        (lambda: zeropg.load_checkpoint(3, model), ["TypeError"]),
        (lambda: zeropg.full_optimizer_state_dict(torch.optim.SGD(plain.parameters())), ["TypeError"]),
    ]
    for action, words in cases:
        text = attempt(action)
        for word in words:
            assert word in text, (word, text)
    if rank == 1:
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    text = attempt(zeropg.save_checkpoint, directory, model, optimizer)
    assert "the optimizer's param_groups" in text and "ranks that differ: 1" in text
    assert not directory.exists()


def copies(directory: Path) -> None:
    import zeropg

    model, optimizer = make(seed=1)
    own = directory / f"rank{dist.get_rank()}"
    zeropg.save_checkpoint(directory / "rank0", model, optimizer)
    if dist.get_rank() == 0:
        shutil.copytree(directory / "rank0", directory / "rank1")
    dist.barrier()
    zeropg.load_checkpoint(own, model, optimizer)
    text = attempt(zeropg.load_checkpoint, own, model, [None, optimizer][dist.get_rank()])
    assert "optimizer is 'None' on rank 0" in text and "ranks that differ: 1" in text, text
    text = attempt(lambda: zeropg.load_checkpoint(own, model, strict=dist.get_rank() == 0))
    assert "strict is 'True' on rank 0" in text and "ranks that differ: 1" in text, text
    zeropg.save_checkpoint(directory / "rank0", model, optimizer, extra="newer")
    text = attempt(zeropg.load_checkpoint, own, model)
    assert "load_checkpoint: the checkpoint (its inner folder) is" in text, text


def test_each_rank_may_have_a_copy_of_its_own(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(copies, tmp_path)


def with_experts(directory: Path) -> None:
    import zeropg

    model = nn.Linear(4, 4)
    model.expert = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    model.shared = nn.Parameter(torch.ones(3))
    zeropg.fully_shard(model, ignored_params=[model.expert, model.shared])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        zeropg.save_checkpoint(directory, model)
    texts = [str(one.message) for one in seen if "[zeropg]" in str(one.message)]
    assert len(texts) == (1 if dist.get_rank() == 0 else 0), texts
    assert all("1 ignored parameters have other values on other ranks (expert)" in text for text in texts)


def with_many_experts(directory: Path) -> None:
    """What ranks tell each other is short for each of them; what is too long all the same is said."""
    import zeropg
    from zeropg.rank_io import agreement

    model = nn.Linear(4, 4)
    model.experts = nn.ParameterList(torch.ones(1) for _ in range(1000))
    zeropg.fully_shard(model, ignored_params=list(model.experts))
    with mock.patch.object(agreement, "_MAX_TEXT_BYTES", 12_000):
        zeropg.save_checkpoint(directory, model)
        zeropg.load_checkpoint(directory, model)
        with pytest.raises(RuntimeError, match=r"this rank has 1\d+ bytes to tell, more than 12000"):
            agreement.together(dist.group.WORLD, "test", lambda: "x" * 12_000)


def test_ignored_parameters_that_differ_between_ranks_are_named(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(with_experts, tmp_path)
    rank_pool(2).run(with_many_experts, tmp_path)


def test_wrong_arguments_are_refused_on_every_rank(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(wrong_arguments, tmp_path / "new")


# In the background.


@contextlib.contextmanager
def slow_writes() -> Iterator[None]:
    """The save in the background that begins here writes half a second later."""
    from zeropg.checkpoint.save import Save

    write, has_begun = Save.write_in_background, threading.Event()

    def write_late(self: Save) -> None:
        has_begun.set()
        time.sleep(0.5)
        write(self)

    with mock.patch.object(Save, "write_in_background", write_late):
        yield
        has_begun.wait(10)


def background(directory: Path) -> None:
    import zeropg

    model, optimizer = make(seed=1)
    expected = everything(model, optimizer)
    pending = zeropg.save_checkpoint(directory / "a", model, optimizer, extra={"seed": 1}, async_save=True)
    for _ in range(3):  # what is written is what was there at the call
        model(torch.randint(31, (8,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pending.result() == directory / "a" and pending.done()
    pending.wait()
    pending = zeropg.save_checkpoint(directory / "b", model, optimizer, async_save=True)
    again = zeropg.save_checkpoint(directory / "b", model, async_save=True)  # joins the first
    assert pending.done()
    zeropg.load_checkpoint(directory / "a", model, optimizer)  # joins the second
    assert again.done() and (directory / "b" / MANIFEST).exists()
    assert same(everything(model, optimizer), expected)
    with slow_writes():
        zeropg.save_checkpoint(directory / "c", model, optimizer, async_save=True)
    another, its_optimizer = make(seed=2)
    zeropg.load_checkpoint(directory / "a" / ".." / "c", another, its_optimizer)  # joins that of the first model
    assert same(everything(another, its_optimizer), expected)


def test_a_save_in_the_background_writes_what_was_there(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(background, tmp_path)
    run_ranks(1, background, tmp_path / "alone")
    run_ranks(3, background, tmp_path / "gloo", backend="gloo")


def load_what_others_save(directory: Path) -> None:
    import zeropg

    pair = dist.new_group([0, 1])
    saved = nn.Linear(64, 64)
    nn.init.constant_(saved.weight, 5.0)
    if dist.get_rank() < 2:
        zeropg.fully_shard(saved, process_group=pair)
        with slow_writes():
            zeropg.save_checkpoint(directory, saved, async_save=True)
    model = zeropg.fully_shard(nn.Linear(64, 64))
    zeropg.load_checkpoint(directory, model)  # rank 2 has no part in the save, and waits too
    assert bool((zeropg.full_state_dict(model, rank0_only=False)["weight"] == 5.0).all())


def test_a_load_waits_for_a_save_that_other_ranks_have_begun(tmp_path: Path) -> None:
    run_ranks(3, load_what_others_save, tmp_path / "new")


def snapshot(directory: Path) -> None:
    import zeropg
    from zeropg.checkpoint.save import Save

    take = Save._take_snapshot
    kept: list[bool] = []

    def take_and_look(self: Save) -> None:
        take(self)
        own = {tensor.data_ptr() for file in self._own_files.values() for tensor in file.tensors}
        assert self._snapshot is not None
        kept.append(own <= {part.values.data_ptr() for part in self._snapshot})

    Save._take_snapshot = take_and_look  # type: ignore[method-assign]
    try:
        model, optimizer = make(seed=1)
        extra = {"table": torch.arange(1000)}
        zeropg.save_checkpoint(directory, model, optimizer, extra=extra, async_save=True).wait()
    finally:
        Save._take_snapshot = take  # type: ignore[method-assign]
    assert kept == [True]


def test_a_save_in_the_background_copies_extra_values_once(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(snapshot, tmp_path)


def failing_background(directory: Path) -> None:
    import zeropg
    from zeropg.rank_io.parallel_files import ParallelFiles

    model, optimizer = make(seed=1)
    write = ParallelFiles.sync
    if dist.get_rank() == 1:

        def fail(self: ParallelFiles) -> None:
            raise OSError(5, "the cable is out")

        ParallelFiles.sync = fail  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = zeropg.save_checkpoint(directory, model, optimizer, async_save=True)
        text = attempt(zeropg.save_checkpoint, directory, model, optimizer)
        assert "the save before failed in the background" in text and "rank 1: the cable is out" in text
        first.wait()  # told once
        second = zeropg.save_checkpoint(directory, model, optimizer, async_save=True)
        text = attempt(second.wait)
        assert f"rank {dist.get_rank()}/2" in text and "rank 1: the cable is out" in text
    ParallelFiles.sync = write  # type: ignore[method-assign]
    zeropg.save_checkpoint(directory, model, optimizer)
    assert len(list(directory.iterdir())) == 2


def test_an_error_in_the_background_is_raised_once_on_every_rank(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(failing_background, tmp_path)


def save_and_leave(directory: Path) -> None:
    import zeropg
    from zeropg.rank_io.parallel_files import ParallelFiles

    model, optimizer = make(seed=1)
    write = ParallelFiles.write

    def slow(self: ParallelFiles, part: Any) -> None:
        time.sleep(0.02)
        write(self, part)

    ParallelFiles.write = slow  # type: ignore[method-assign]
    zeropg.save_checkpoint(
        directory, model, optimizer, extra={"seed": 1}, rank_extra=[dist.get_rank()], async_save=True
    )


def test_the_interpreters_exit_waits_for_a_save(rank_pool: Any, tmp_path: Path) -> None:
    # run_ranks ends the interpreters right after the call; the group is destroyed before.
    run_ranks(2, save_and_leave, tmp_path)
    assert loaded_seed(rank_pool(2), tmp_path) == 1
