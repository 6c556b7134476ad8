"""Damaged and foreign checkpoints, disks that refuse, ranks that die: clear errors, and the last good one loads."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integration.checkpoint_zoo import (
    MANIFEST,
    assert_failed,
    attempt,
    everything,
    loaded_seed,
    make,
    names,
    same,
    save,
    try_save,
)
from tests.spawn import RankPool, run_ranks

# Checkpoints that are damaged, foreign or hostile. Afterwards the model is as it was.


def refused_and_unchanged(directory: Path) -> str:
    import zeropg

    model, optimizer = make(seed=9)
    before = everything(model, optimizer)
    text = attempt(zeropg.load_checkpoint, directory, model, optimizer)
    if "old and new values" not in text:
        assert same(everything(model, optimizer), before), text
    return text


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def data_file(directory: Path, name: str) -> Path:
    (data,) = directory.glob("data-*")
    return data / name


def rewrite_manifest(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A hostile manifest: its checksum is right."""
    from zeropg._native import _C

    body = json.loads((directory / MANIFEST).read_text())["manifest"]
    change(body)
    text = json.dumps(body).encode()
    head = f'{{"zeropg_checkpoint": 1, "crc32c": "{_C.crc32c(text):08x}", "manifest":\n'
    (directory / MANIFEST).write_bytes(head.encode() + text + b"}\n")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "truncated weights": (
        lambda d: os.truncate(data_file(d, "model.safetensors"), 2000),
        ["ValueError", "model.safetensors' has 2000 bytes, expected", "it was cut off"],
    ),
    "longer weights": (
        lambda d: os.truncate(data_file(d, "model.safetensors"), 200000),
        ["ValueError", "has 200000 bytes", "it was changed"],
    ),
    "flipped weight": (
        lambda d: flip(data_file(d, "model.safetensors"), -100),
        ["ValueError", "model.safetensors' is damaged: bytes [0, ", "CRC-32C", "old and new values"],
    ),
    "flipped header": (lambda d: flip(data_file(d, "model.safetensors"), 3), ["is damaged"]),
    "flipped state": (
        lambda d: flip(data_file(d, "optimizer.safetensors"), -100),
        ["ValueError", "optimizer.safetensors' is damaged", "old and new values"],
    ),
    "flipped extra": (lambda d: flip(data_file(d, "extra.safetensors"), 30), ["extra.safetensors' is damaged"]),
    "flipped rank extra": (
        lambda d: flip(data_file(d, "rank-00001.safetensors"), 30),
        ["rank 1:", "rank-00001.safetensors' is damaged"],
    ),
    "missing file": (
        lambda d: data_file(d, "optimizer.safetensors").unlink(),
        ["FileNotFoundError", "could not open", "optimizer.safetensors", "No such file"],
    ),
    "missing folder": (lambda d: shutil.rmtree(data_file(d, "")), ["FileNotFoundError", "No such file", "data-"]),
    "missing manifest": (
        lambda d: (d / MANIFEST).unlink(),
        ["FileNotFoundError", "holds no checkpoint", "a save into it never finished"],
    ),
    "truncated manifest": (lambda d: os.truncate(d / MANIFEST, 500), ["ValueError", MANIFEST, "damaged, cut off"]),
    "empty manifest": (lambda d: os.truncate(d / MANIFEST, 0), ["ValueError", "damaged, cut off"]),
    "flipped manifest": (
        lambda d: flip(d / MANIFEST, 400),
        ["ValueError", MANIFEST, "is damaged: its text has the CRC-32C"],
    ),
    "flipped checksum": (lambda d: flip(d / MANIFEST, 40), ["ValueError", MANIFEST]),
    "newer manifest": (
        lambda d: (d / MANIFEST).write_text((d / MANIFEST).read_text().replace('int": 1', 'int": 9', 1)),
        ["ValueError", "is a checkpoint of format 9, expected 1"],
    ),
    # An open would wait for whoever writes to them.
    "pipe as manifest": (lambda d: make_pipe(d / MANIFEST), ["ValueError", "is a pipe, a socket or a device"]),
    "pipe as data": (
        lambda d: make_pipe(data_file(d, "optimizer.safetensors")),
        ["ValueError", "optimizer.safetensors' is a pipe"],
    ),
    "hostile folder": (lambda d: rewrite_manifest(d, lambda m: m.update(folder="../other")), ["'../other'"]),
    "hostile file": (
        lambda d: rewrite_manifest(d, lambda m: m["files"].update({"/etc/passwd": m["files"]["extra.safetensors"]})),
        ["a file is called '/etc/passwd'"],
    ),
    "hostile length": (
        lambda d: rewrite_manifest(d, lambda m: m["files"]["model.safetensors"].update(bytes=1 << 61)),
        ["ValueError", "expected one checksum per"],
    ),
    "hostile chunk": (
        lambda d: rewrite_manifest(d, lambda m: m.update(chunk_bytes=1000)),
        ["ValueError", "expected one checksum per"],
    ),
    "hostile shape": (
        lambda d: rewrite_manifest(d, lambda m: m["tensors"]["embed.weight"].update(shape=[1 << 40, 1 << 40])),
        ["ValueError", "does not fit into"],
    ),
    "hostile offset": (
        lambda d: rewrite_manifest(d, lambda m: m["tensors"]["embed.weight"].update(offset=-8)),
        ["ValueError", "-8 stands where a size should"],
    ),
    "hostile dtype": (
        lambda d: rewrite_manifest(d, lambda m: m["tensors"]["embed.weight"].update(dtype="load")),
        ["ValueError", "'load' is no dtype"],
    ),
    "hostile types": (
        lambda d: rewrite_manifest(d, lambda m: m.update(files=[1, 2])),
        ["ValueError", "stands where a dict should"],
    ),
}


def hostile_header(directory: Path) -> None:
    """An extra file whose header claims to be huge, with checksums that fit."""
    from zeropg._native import _C

    path = data_file(directory, "extra.safetensors")
    content = (1 << 62).to_bytes(8, "little") + path.read_bytes()[8:]
    path.write_bytes(content)
    entry = {"bytes": len(content), "crc32c": f"{_C.crc32c(content):08x}"}
    rewrite_manifest(directory, lambda m: m["files"].update({"extra.safetensors": entry}))


DAMAGE["hostile header"] = (hostile_header, ["ValueError", "header"])


def test_what_is_damaged_or_hostile_is_refused_on_every_rank(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(2)
    pool.run(save, tmp_path / "good", 1)
    for name, (damage, words) in DAMAGE.items():
        directory = tmp_path / name
        shutil.copytree(tmp_path / "good", directory)
        damage(directory)
        errors = pool.run(refused_and_unchanged, directory)
        assert all(errors), name
        assert_failed(errors, "load_checkpoint: ", *words)
    assert loaded_seed(pool, tmp_path / "good") == 1


def load_into_another_model(directory: Path) -> list[str]:
    import zeropg

    texts = []
    wider, _ = make(width=14, optimizer=False)
    texts.append(attempt(zeropg.load_checkpoint, directory, wider))
    other = zeropg.fully_shard(nn.Sequential(nn.Linear(3, 3)))
    texts.append(attempt(zeropg.load_checkpoint, directory, other))
    model, _ = make(optimizer=False)
    sgd = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    texts.append(attempt(zeropg.load_checkpoint, directory, model, sgd))
    model, _ = make(optimizer=False)
    one_group = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1.0), model)
    texts.append(attempt(zeropg.load_checkpoint, directory, model, one_group))
    model, _ = make(optimizer=False)
    swapped = [{"params": [model.scale]}, {"params": [p for p in model.parameters() if p is not model.scale]}]
    two_groups = zeropg.shard_optimizer(torch.optim.AdamW(swapped, lr=1.0), model)
    texts.append(attempt(zeropg.load_checkpoint, directory, model, two_groups))
    return texts


def test_a_checkpoint_of_another_model_or_optimizer_is_listed(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(2)
    pool.run(save, tmp_path, 1)
    for texts in pool.run(load_into_another_model, tmp_path):
        wider, other, sgd, one_group, two_groups = texts
        assert "embed.weight (torch.float32 [31, 13], here torch.float32 [31, 14])" in wider and "more" in wider
        assert "not in the checkpoint: 0.weight, 0.bias" in other and "not in the model: " in other
        assert "optimizer is a torch.optim.adamw.AdamW, yours a torch.optim.sgd.SGD" in sgd
        assert "the checkpoint's optimizer has 2 param groups, yours 1" in one_group
        assert "param group 0 holds other parameters" in two_groups and "only here: scale" in two_groups


def what_one_rank_gives_wrongly(directory: Path) -> list[str]:
    import zeropg

    model, optimizer = make()
    is_wrong = dist.get_rank() == 1
    given = torch.optim.AdamW(nn.Linear(2, 2).parameters()) if is_wrong else optimizer
    calls = [(zeropg.save_checkpoint, given), (zeropg.load_checkpoint, given)]
    texts = [attempt(call, directory, model, each) for call, each in calls]
    scale = model.scale
    if is_wrong:
        model.scale = nn.Parameter(torch.rand(13))
    texts += [attempt(call, directory, model) for call in (zeropg.save_checkpoint, zeropg.load_checkpoint)]
    texts.append(attempt(zeropg.load_pretrained, model, directory))
    model.scale = scale
    zeropg.save_checkpoint(directory, model, optimizer)  # nobody waits for anybody
    return texts


def test_what_one_rank_gives_wrongly_is_an_error_on_all(rank_pool: Any, tmp_path: Path) -> None:
    """The others used to wait for it until they met in another call."""
    for texts in rank_pool(2).run(what_one_rank_gives_wrongly, tmp_path):
        assert all("rank 1: [zeropg] " in text and "got a AdamW, expected what" in text for text in texts[:2]), texts
        assert all("rank 1: [zeropg rank 1/2] " in text and "'scale' changed" in text for text in texts[2:]), texts


def give_no_directory() -> list[str]:
    import zeropg

    model, _ = make(optimizer=False)
    calls: list[Callable[..., Any]] = [zeropg.save_checkpoint, zeropg.load_checkpoint]
    texts = [attempt(call, "", model) for call in calls]
    return [*texts, *(attempt(call, model, "") for call in (zeropg.load_pretrained, zeropg.save_16bit_weights))]


def test_an_empty_name_is_not_the_working_directory(rank_pool: Any) -> None:
    for texts in rank_pool(2).run(give_no_directory):
        assert all("the directory is '', expected a path" in text for text in texts), texts


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda p: None, "there is no such directory"),
    "empty": (lambda p: p.mkdir(), "it is empty"),
    "deepspeed": (lambda p: touch(p / "latest", p / "global_step5" / "mp_rank_00_model_states.pt"), "DeepSpeed"),
    "deepspeed's inner": (lambda p: touch(p / "zero_pp_rank_0_mp_rank_00_optim_states.pt"), "python -m zeropg export"),
    "torch.save": (lambda p: torch.save({}, p), "it is a file of torch.save"),
    "folder of torch.save": (lambda p: touch(p / "pytorch_model.bin"), "it holds files of torch.save"),
    "dcp": (lambda p: touch(p / ".metadata", p / "__0_0.distcp"), "torch.distributed.checkpoint"),
    "export": (lambda p: touch(p / "model.safetensors"), "it holds exported weights"),
    "safetensors": (lambda p: touch(p.with_suffix(".safetensors")), "there is no such directory"),
    "file": (lambda p: touch(p), "it is a file, expected a directory"),
    "another": (lambda p: touch(p / "readme.md"), "it holds no checkpoint"),
}


def try_loads(directories: list[Path]) -> list[str]:
    import zeropg

    model, _ = make(optimizer=False)
    return [attempt(zeropg.load_checkpoint, directory, model) for directory in directories]


def test_what_is_no_checkpoint_of_ours_is_named(rank_pool: Any, tmp_path: Path) -> None:
    for name, (prepare, _) in FOREIGN.items():
        prepare(tmp_path / name)
    results = rank_pool(2).run(try_loads, [tmp_path / name for name in FOREIGN])
    for name, *errors in zip(FOREIGN, *results, strict=True):
        assert_failed(errors, "FileNotFoundError", "ranks 0, 1: ", "holds no checkpoint of zeropg", FOREIGN[name][1])


# Disks that refuse. The checkpoint before stays.


@contextlib.contextmanager
def mounted(target: Path, *options: str) -> Iterator[None]:
    target.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not allowed here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_full_disk_and_a_read_only_one(rank_pool: Any, tmp_path: Path) -> None:
    pool = rank_pool(2)
    with mounted(tmp_path / "disk", "-o", "size=60k"):
        pool.run(save, tmp_path / "disk", 1)  # about 40 KB
        errors = pool.run(try_save, tmp_path / "disk", 2)
        assert_failed(errors, "OSError", "rank 0: could not reserve space for '", "No space left", str(tmp_path))
        assert len(names(tmp_path / "disk")) == 2
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        errors = pool.run(try_save, tmp_path / "disk", 3)
        assert_failed(errors, "OSError", "rank 0: ", "Read-only file system", str(tmp_path))
        assert loaded_seed(pool, tmp_path / "disk") == 1
    (tmp_path / "file").write_text("x")
    assert_failed(
        pool.run(try_save, tmp_path / "file", 1), "OSError", "rank 0: ", "cannot be a directory: it, or a part"
    )
    (tmp_path / "taken" / MANIFEST).mkdir(parents=True)
    assert_failed(pool.run(try_save, tmp_path / "taken", 1), "is a directory; remove it")


def save_with_limit(directory: Path, limited_rank: int, async_save: bool) -> str:
    import zeropg

    model, optimizer = make(seed=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pending = zeropg.save_checkpoint(directory, model, optimizer, async_save=async_save)
            return attempt(pending.wait) if async_save else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "in the background"])
def test_a_rank_that_cannot_write_fails_all(rank_pool: Any, tmp_path: Path, async_save: bool) -> None:
    pool = rank_pool(2)
    pool.run(save, tmp_path, 1)
    for limited_rank in (0, 1):
        errors = pool.run(save_with_limit, tmp_path, limited_rank, async_save)
        assert_failed(errors, "OSError", f"rank {limited_rank}: could not ", "File too large", str(tmp_path))
    assert loaded_seed(pool, tmp_path) == 1
    assert len(names(tmp_path)) == 2


# Ranks that die: whatever the moment, the directory holds the older checkpoint or the newer one, whole.


def save_and_die(directory: Path, seed: int, victims: list[int], async_save: bool, when: float) -> str:
    """`when`: the moment of death as a part of the time that a save takes."""
    import zeropg
    import zeropg.rank_io.store_agreement

    zeropg.rank_io.store_agreement._PATIENCE_SECONDS = 3.0
    model, optimizer = make(seed=seed)
    for _ in range(2):  # the first save also loads modules
        start = time.monotonic()
        zeropg.save_checkpoint(directory / "warm up", model, optimizer)
        duration = time.monotonic() - start
    dist.barrier()
    if dist.get_rank() in victims:

        def die() -> None:
            time.sleep(when * duration)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die).start()
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = attempt(save_into, directory / "a", model, optimizer, seed, async_save)
    if dist.get_rank() in victims:
        time.sleep(60)
    assert time.monotonic() - start < 30, text
    return text


def save_into(directory: Path, model: Any, optimizer: Any, seed: int, async_save: bool) -> None:
    import zeropg

    values = {"extra": {"seed": seed}, "rank_extra": [dist.get_rank()]}
    pending = zeropg.save_checkpoint(directory, model, optimizer, async_save=async_save, **values)
    if pending is not None:
        pending.wait()


@pytest.mark.soak
def test_ranks_killed_at_random_moments_leave_the_last_good_checkpoint(rank_pool: Any, tmp_path: Path) -> None:
    # Other moments in every run; pytest shows what is printed here when the test fails.
    seed = int(os.environ.get("ZEROPG_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"the moments are those of ZEROPG_TEST_SEED={seed}")
    random_moment = random.Random(seed)
    living = rank_pool(2)
    living.run(save, tmp_path / "a", 0)
    last = 0
    outcomes = []
    with RankPool(2) as pool:
        for trial in range(1, 21):
            victims = [[0], [1], [0, 1]][trial % 3]
            arguments = (tmp_path, trial, victims, trial % 2 == 0, random_moment.uniform(0, 1.3))
            results = pool.run(save_and_die, *arguments, timeout=60, expect_death=victims)
            errors = [text for rank, text in enumerate(results) if rank not in victims]
            assert all(text == "" or "DistBackendError: [zeropg rank" in text for text in errors), errors
            found = loaded_seed(living, tmp_path / "a")
            assert found in (last, trial), (trial, victims)
            assert found == trial or all(errors), "a rank was told of a checkpoint that is not there"
            outcomes.append(found == trial)
            last = found
    assert not all(outcomes), "every save ended before its ranks were killed"
    living.run(save, tmp_path / "a", 99)
    assert loaded_seed(living, tmp_path / "a") == 99
    assert len(names(tmp_path / "a")) == 2, "leftovers of the killed saves"


# Ranks on another host: a mount namespace in which the directory is another one.


def leave_the_file_system(directory: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, recursive = 0x20000, 1 << 18, 0x4000
    if (
        libc.unshare(new_namespace) != 0
        or libc.mount(b"none", b"/", None, private | recursive, None) != 0
        or libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, None) != 0
    ):
        raise OSError(ctypes.get_errno(), "no namespace")


def save_elsewhere(directory: Path) -> list[str]:
    import zeropg

    model, optimizer = make(seed=3)
    if dist.get_rank() == 1:
        leave_the_file_system(directory)
    texts = [attempt(zeropg.save_checkpoint, directory / "b", model, optimizer, async_save=True)]
    texts.append(attempt(save_into, directory / "a", model, optimizer, 3, False))
    texts.append(attempt(zeropg.load_checkpoint, directory / "a", model, optimizer))
    return texts


def test_a_rank_without_the_file_system_sends_its_part(rank_pool: Any, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("making a mount namespace is not allowed here")
    background, saved, loaded = zip(*run_ranks(2, save_elsewhere, tmp_path), strict=True)
    assert_failed(list(background), "NotImplementedError", "ranks 1 do not see the files", "async_save=False")
    assert saved == ("", "")
    assert_failed(list(loaded), "FileNotFoundError", "rank 1: ", "holds no checkpoint", "that this rank sees")
    assert names(tmp_path / "b") == []
    assert loaded_seed(rank_pool(2), tmp_path / "a") == 3
