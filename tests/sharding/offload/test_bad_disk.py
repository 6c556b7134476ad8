"""Disks that are missing, full, read-only or change what was written: the same clear error on every rank, at once."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.sharding.offload.test_offloaded_training import BF16, assert_same, on_disk, set_up, train, whole
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import make_model
from tests.spawn import RankPool


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_one(path: Path, other: Path) -> Path:
    """`path` on rank 1, `other` elsewhere."""
    return path if dist.get_rank() == 1 else other


def swap_file(directory: Path) -> str:
    """This rank's nameless file, through its descriptor."""
    for entry in os.scandir("/proc/self/fd"):
        target = os.readlink(entry.path)
        if target.startswith(str(directory)) and target.endswith("(deleted)"):
            return entry.path
    raise AssertionError("no swap file is open")


@on_ranks(2)
def test_a_directory_that_one_rank_lacks(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with raises(OSError, "fully_shard: rank 1: [zeropg rank 1/2] offload", f"in {missing} failed", "name an existing"):
        zeropg.fully_shard(make_model(), offload_optimizer=on_one(missing, tmp_path))
    set_up("adamw", stage=3, offload_optimizer=tmp_path)  # and the group still works


@on_ranks(2)
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with raises(OSError, "rank 1", "making a swap file in /proc"):
        zeropg.fully_shard(make_model(), offload_optimizer=on_one(Path("/proc"), tmp_path))


def test_a_read_only_disk(small_disk: Path, rank_pool: Any) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    rank_pool(2).run(_read_only, small_disk)


def _read_only(disk: Path) -> None:
    with raises(OSError, "ranks 0, 1" if dist.get_world_size() < 2 else "Read-only file system", str(disk)):
        zeropg.fully_shard(make_model(), offload_optimizer=disk)


@on_ranks(2)
def test_a_disk_too_full_for_the_masters(tmp_path: Path) -> None:
    started = time.monotonic()
    if dist.get_rank() == 1:
        with (
            file_size_limit(64 * 1024),
            raises(OSError, "[zeropg rank 1/2] offload: reserving", "for masters of unit", "File too large"),
        ):
            zeropg.fully_shard(make_model(), offload_optimizer=on_disk(tmp_path), **BF16)
    else:
        with raises(OSError, "[zeropg rank 0/2] fully_shard: rank 1 could not reserve room for its masters"):
            zeropg.fully_shard(make_model(), offload_optimizer=on_disk(tmp_path), **BF16)
    assert time.monotonic() - started < 20


@on_ranks(2)
def test_a_disk_too_full_for_the_state(tmp_path: Path) -> None:
    model = zeropg.fully_shard(make_model(), offload_optimizer=on_disk(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    limit = 100 * 1024 if dist.get_rank() == 1 else resource.RLIM_INFINITY
    with (
        file_size_limit(limit),
        raises(OSError, "shard_optimizer: rank 1: [zeropg rank 1/2] offload: reserving", "for exp_avg", "free space"),
    ):
        zeropg.shard_optimizer(optimizer, model)


def test_a_full_disk_says_so(small_disk: Path, rank_pool: Any) -> None:
    rank_pool(2).run(_fill, small_disk)


def _fill(disk: Path) -> None:
    model = zeropg.fully_shard(make_model(), stage=0, offload_optimizer=zeropg.Offload(device="nvme", path=disk))
    with raises(OSError, "No space left on device (errno 28)", "shard_optimizer", str(disk)):
        zeropg.shard_optimizer(torch.optim.AdamW(model.parameters()), model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_file_that_was_cut_ends_the_step_on_all_ranks(tmp_path: Path, stage: int) -> None:
    model, optimizer = set_up("adamw", stage=stage, offload_optimizer=on_disk(tmp_path), **BF16)
    train(model, optimizer, range(2))
    if dist.get_rank() == 1:
        os.truncate(swap_file(tmp_path), 8192)
    started = time.monotonic()
    with raises(OSError, "step: rank 1: [zeropg rank 1/2] offload: reading", "resume from a checkpoint"):
        train(model, optimizer, range(2, 3))
    assert time.monotonic() - started < 20
    with raises(RuntimeError, "an earlier step stopped half-way", "load a checkpoint"):
        optimizer.step()
    again, its_optimizer = set_up("adamw", stage=stage, offload_optimizer=on_disk(tmp_path), **BF16)
    train(again, its_optimizer, range(1))


def write_to_a_disk_that_fails(path: Path, stage: int) -> None:
    model, _ = set_up("adamw", stage=stage, offload_optimizer=on_disk(path), **BF16)
    started = time.monotonic()
    if dist.get_rank() == 1:
        limit, words = 4096, ("[zeropg rank 1/2] offload: writing", "File too large", "resume from a checkpoint")
    else:
        limit, words = resource.RLIM_INFINITY, ("[zeropg rank 0/2] full_parameters: rank 1 could not", "see its error")
    with (
        file_size_limit(limit),
        raises(OSError, *words),
        zeropg.full_parameters(model, writable=True),
        torch.no_grad(),
    ):
        for parameter in model.parameters():
            parameter.fill_(0.5)
    if stage == 3:
        for parameter in model.parameters():
            with raises(RuntimeError, "is sharded"):
                parameter.sum()
    its_own = "offload: reading" if dist.get_rank() == 1 else "full_state_dict: rank 1 could not read"
    with raises(OSError, f"[zeropg rank {dist.get_rank()}/2] {its_own}"):
        zeropg.full_state_dict(model)
    with raises(OSError, "rank 1"):
        zeropg.load_full_state_dict(model, make_model(seed=7).state_dict())
    again, its_optimizer = set_up("adamw", stage=stage, offload_optimizer=on_disk(path), **BF16)
    train(again, its_optimizer, range(1))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_disk_that_does_not_take_what_was_written_to_parameters(tmp_path: Path, stage: int) -> None:
    write_to_a_disk_that_fails(tmp_path, stage)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, backend="gloo")
def test_a_disk_that_does_not_take_what_was_written_to_parameters_over_gloo(tmp_path: Path, stage: int) -> None:
    write_to_a_disk_that_fails(tmp_path, stage)


@pytest.fixture
def disk_that_can_die(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 8 MiB on a loop device."""
    disk, image = tmp_path / "dying", tmp_path / "image"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(8 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, disk]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system on a loop device here: {error}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


EXT4_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: every read and write is an I/O error from then on
WITHOUT_LAST_WORDS = struct.pack("I", 2)


@contextmanager
def a_dead_disk(disk: Path) -> Iterator[None]:
    if dist.get_rank() == 1:
        folder = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(folder, EXT4_SHUTDOWN, WITHOUT_LAST_WORDS)
        os.close(folder)
    yield


@contextmanager
def a_disk_that_takes_no_more(_: Path) -> Iterator[None]:
    with file_size_limit(8192 if dist.get_rank() == 1 else resource.RLIM_INFINITY):
        yield


def train_on_a_failing_disk(
    folder: Path, disk: Path, failing: Callable[[Path], AbstractContextManager[None]], words: str
) -> None:
    """Trains, saves, trains until the disk of rank 1 fails; goes on from what was saved, on another disk."""
    options = {"stage": 2, **BF16}
    model, optimizer = set_up("adamw", offload_optimizer=on_disk(on_one(disk, folder)), **options)
    train(model, optimizer, range(2))
    zeropg.save_checkpoint(folder / "checkpoint", model, optimizer)
    train(model, optimizer, range(2, 4))
    with failing(disk), raises(OSError, "step: rank 1: [zeropg rank 1/2] offload: ", words, str(disk), "resume from"):
        train(model, optimizer, range(4, 5))
    del model, optimizer
    again, its_optimizer = set_up("adamw", offload_optimizer=on_disk(folder), **options)
    zeropg.load_checkpoint(folder / "checkpoint", again, its_optimizer)
    losses = train(again, its_optimizer, range(2, 5))
    model, optimizer = set_up("adamw", **options)
    assert train(model, optimizer, range(5))[2:] == losses
    assert_same(whole(again), whole(model))


def test_training_goes_on_from_a_checkpoint_after_the_disk_died(
    tmp_path: Path, disk_that_can_die: Path, rank_pool: Any
) -> None:
    rank_pool(2).run(train_on_a_failing_disk, tmp_path, disk_that_can_die, a_dead_disk, "Input/output error (errno 5)")


def test_training_goes_on_from_a_checkpoint_after_the_disk_took_no_more(tmp_path: Path, rank_pool: Any) -> None:
    arguments = (a_disk_that_takes_no_more, "File too large (errno 27)")
    rank_pool(2).run(train_on_a_failing_disk, tmp_path, tmp_path, *arguments)


@on_ranks(2)
def test_bytes_that_changed_are_noticed(tmp_path: Path) -> None:
    model, optimizer = set_up("sgd", stage=1, offload_optimizer=on_disk(tmp_path))
    train(model, optimizer, range(2))
    if dist.get_rank() == 0:
        with open(swap_file(tmp_path), "r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 64)
    with raises(OSError, "rank 0", "they are not what was written", "check the disk"):
        train(model, optimizer, range(2, 3))


def _train_and_die(directory: Path) -> str:
    model, optimizer = set_up("adamw", stage=1, offload_optimizer=on_disk(directory), **BF16)
    train(model, optimizer, range(2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, optimizer, range(2, 5))
    except Exception as error:
        return str(error)
    return "no error"


def test_a_killed_rank_leaves_no_file_and_the_others_are_told(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        results = pool.run(_train_and_die, tmp_path, timeout=40, expect_death=(1,))
    assert "rank 1" in results[0]
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_two_models_share_a_directory(tmp_path: Path) -> None:
    """As two jobs do: neither sees the other's file."""
    first, second = (set_up("adamw", stage=3, offload_optimizer=tmp_path) for _ in range(2))
    assert train(*first) == train(*second)
    assert not list(tmp_path.iterdir())
