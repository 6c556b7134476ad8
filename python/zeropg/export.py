"""Writes a sharded model's weights in 16 bits as Hugging Face's safetensors files, every rank its own part."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from zeropg._agreement import collective_device, peers_needed, together
from zeropg._commit import INDEX_NAME
from zeropg._export_plan import ExportPlan, companion_files, index_json, make_plan
from zeropg._staged_files import StagedFiles

_OPERATION = "save_16bit_weights"
_STREAM_BYTES = 16 << 20  # per broadcast, on every rank; only where the directory is not shared
_PROGRESS_DELAY = 1.0  # seconds


def save_16bit_weights(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes the model's weights in 16 bits in Hugging Face's safetensors layout. Collective.

    The result is `model.safetensors`, or `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. It
    holds what `module.to(dtype).state_dict()` would: floating parameters (from their masters) and persistent floating
    buffers (rank 0's) cast to nearest even, other tensors as they are. Tied tensors are written once; their other names
    stand in the files' metadata, and `safetensors.torch.load_model` ties them again. A Hugging Face model also gets
    `config.json` and `generation_config.json`, so that `from_pretrained(directory)` loads it.

    Every rank writes its own byte ranges; none needs more memory than its shard and 4 MiB. Ranks that do not see the
    directory (no shared file system) send their part to rank 0. An older export in the directory stays whole until this
    one is complete, and stays when anything fails.

    Args:
        model: a module that `fully_shard` has sharded, in any stage; to be called on every rank of its group.
        directory: the same on every rank; made if it does not exist. Files get mode 0600.
        dtype: torch.bfloat16 or torch.float16.
        max_shard_size: most bytes of tensors in one file: a number, or text like "5GB" (1000s) or "5GiB" (1024s). A
            larger tensor gets a file of its own.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument or the model does not fit, or differs between ranks.
        OSError: a file could not be written on some rank; the message names rank, path, offset and errno.
        DistBackendError: a rank died.
        Every rank raises the same error, temporary files are removed, the directory holds what it held before.
    """
    core = getattr(model, "_zeropg", None)
    if core is None:
        raise TypeError(
            f"{_OPERATION}: expected a model sharded by zeropg.fully_shard, got {type(model).__name__}; shard it "
            "first, or save a plain module with safetensors.torch.save_model"
        )
    group: dist.ProcessGroup = core.process_group
    plan: ExportPlan | None = None

    def announce() -> dict[str, str]:
        nonlocal plan
        plan = make_plan(model, directory, dtype, max_shard_size)
        return {**plan.arguments, "token": secrets.token_hex(8)}

    announced = together(group, _OPERATION, announce)
    assert plan is not None  # otherwise the line above has raised
    _check_same(group, announced, list(plan.arguments))
    files = StagedFiles(plan.directory, plan.layout, announced[0]["token"])
    export = _Export(model, group, plan, files)
    try:
        export.run(dtype)
    finally:
        files.close(is_committed=export.is_committed)


def _local_shards(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    import zeropg  # late: zeropg/__init__ imports this module

    shards: Iterator[tuple[str, torch.Tensor, int, int]] = zeropg.local_shards(model)
    return shards


def _check_same(group: dist.ProcessGroup, announced: list[dict[str, str]], keys: list[str]) -> None:
    for key in keys:
        others = [str(rank) for rank, entry in enumerate(announced) if entry[key] != announced[0][key]]
        if others:
            raise ValueError(
                f"[zeropg rank {group.rank()}/{group.size()}] {_OPERATION}: {key} is {announced[0][key]!r} on rank 0, "
                f"but {announced[int(others[0])][key]!r} on rank {others[0]} (ranks that differ: {', '.join(others)}); "
                "pass the same on every rank"
            )


class _Export:
    """One rank's part in one export. `run` is the protocol; every step ends when all ranks have told how it went."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup, plan: ExportPlan, files: StagedFiles) -> None:
        self.is_committed = False
        self._model = model
        self._group = group
        self._plan = plan
        self._files = files
        # Elements of each tensor that this rank has written or sent.
        self._written = torch.zeros(len(plan.tensors), dtype=torch.int64)
        self._advance: Callable[[int], None] = lambda written_bytes: None

    def run(self, dtype: torch.dtype) -> None:
        is_first = self._group.rank() == 0
        self._together(lambda: self._create(dtype) if is_first else None)
        sees_files = self._together(lambda: is_first or self._files.open())
        with _progress(self._plan.layout.tensor_bytes // self._group.size(), is_shown=is_first) as self._advance:
            self._together(lambda: self._write_own() if sees_files[self._group.rank()] else None)
            for rank, sees in enumerate(sees_files):
                if not sees:
                    self._stream_to_first(rank)
            totals = self._sum_written()
            self._together(lambda: self._finish(totals))
        self._together(lambda: self._files.commit() if is_first else None)
        self.is_committed = True

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return together(self._group, _OPERATION, action)

    def _create(self, dtype: torch.dtype) -> None:
        companions = companion_files(self._model, dtype)
        self._files.create([*companions, INDEX_NAME])
        for name, content in companions.items():
            self._files.add_companion(name, content)
        if len(self._plan.layout.files) > 1:
            self._files.add_index(index_json(self._plan))

    def _own_ranges(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields (tensor's index, first element, flat tensor): this rank's masters, the part that is exported."""
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for name, flat, start, stop in _local_shards(self._model):
            index = self._plan.index_of.get(name)
            if index is None and name in names:
                continue  # the model's _keys_to_ignore_on_save
            if index is None or flat.numel() != stop - start or stop > self._plan.tensors[index].value.numel():
                raise RuntimeError(f"the shard [{start}, {stop}) of '{name}' does not fit the model's parameters")
            yield index, start, flat
            self._written[index] += stop - start

    def _write_own(self) -> None:
        for index, start, flat in self._own_ranges():
            self._write(index, start, flat)

    def _write(self, index: int, start: int, flat: torch.Tensor) -> None:
        dtype = self._plan.tensors[index].dtype
        self._files.write(self._plan.layout.places[index], start, flat, dtype)
        self._advance(flat.numel() * dtype.itemsize)

    def _stream_to_first(self, sender: int) -> None:
        # By broadcasts, since every backend has them on every device; rank 0 writes what arrives. A failing rank goes
        # on taking part, so that nobody waits for it, and tells afterwards.
        failure: Exception | None = None
        device = collective_device(self._group)
        ranges = self._chunks() if self._group.rank() == sender else None
        while True:
            data = torch.empty(0, dtype=torch.uint8)
            where = torch.full((3,), -1, dtype=torch.int64)  # file, offset, bytes; -1: the end
            try:
                if ranges is not None and (chunk := next(ranges, None)) is not None:
                    where, data = chunk
            except Exception as error:
                failure = error
            where = where.to(device)
            with peers_needed(self._group, _OPERATION, failure):
                dist.broadcast(where, group=self._group, group_src=sender)
            file, offset, size = where.tolist()
            if size < 0:
                break
            data = data.to(device) if ranges is not None else torch.empty(size, dtype=torch.uint8, device=device)
            with peers_needed(self._group, _OPERATION, failure):
                dist.broadcast(data, group=self._group, group_src=sender)
            if self._group.rank() == 0 and failure is None:
                try:
                    self._files.write_bytes(file, offset, data.cpu().numpy().tobytes())
                except Exception as error:
                    failure = error
        self._together(lambda: _raise(failure))

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields ([file, offset, bytes], the bytes) of this rank's ranges, cast, for a rank that cannot write them."""
        for index, start, flat in self._own_ranges():
            dtype, place = self._plan.tensors[index].dtype, self._plan.layout.places[index]
            offset = place.offset + start * dtype.itemsize
            for part in torch.split(flat.detach(), _STREAM_BYTES // dtype.itemsize):
                data = part.to(dtype).contiguous().view(torch.uint8)
                if data.numel() > 0:
                    yield torch.tensor([place.file, offset, data.numel()]), data
                offset += data.numel()

    def _sum_written(self) -> list[int]:
        totals = self._written.to(collective_device(self._group))
        with peers_needed(self._group, _OPERATION):
            dist.all_reduce(totals, group=self._group)
        return [int(total) for total in totals.tolist()]

    def _finish(self, totals: list[int]) -> None:
        """Rank 0 adds what no rank holds in shards (buffers, ignored parameters); then all data goes to the disk."""
        for index, (tensor, total) in enumerate(zip(self._plan.tensors, totals, strict=True)):
            if total not in (0, tensor.value.numel()):
                raise RuntimeError(
                    f"the ranks wrote {total} of the {tensor.value.numel()} elements of '{tensor.name}'; "
                    "this is a fault of zeropg, please report it"
                )
            if total == 0 and self._group.rank() == 0:
                self._write(index, 0, tensor.value.detach().reshape(-1))
        self._files.finish()


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


@contextmanager
def _progress(total_bytes: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes just written; shows a bar on a terminal once it takes a second."""
    bar: Any = None
    if is_shown and sys.stderr is not None and sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            options = {"unit": "B", "unit_scale": True, "delay": _PROGRESS_DELAY, "leave": False}
            bar = tqdm(total=total_bytes, desc=_OPERATION, **options)

    def advance(written_bytes: int) -> None:
        if bar is not None:
            bar.update(written_bytes)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()
