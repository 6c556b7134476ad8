"""Writes a sharded model's weights in 16 bits as Hugging Face's safetensors files, every rank its own part."""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from zeropg.export.byte_ranges import byte_ranges
from zeropg.export.plan import ExportPlan, companion_files, index_json, make_plan
from zeropg.quantization.packed_layer import PackedLayer
from zeropg.rank_io.agreement import check_same, collective_device, peers_needed, together
from zeropg.rank_io.commit import INDEX_NAME
from zeropg.rank_io.parallel_files import ByteRange
from zeropg.rank_io.progress import progress
from zeropg.rank_io.staged_files import StagedFiles
from zeropg.rank_io.stream import stream_to_first
from zeropg.sharding.access import local_shards
from zeropg.sharding.state import ShardedState, unchecked_state_of
from zeropg.tensor_parallel.pieces import cut_of

_OPERATION = "save_16bit_weights"


def save_16bit_weights(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes the model's weights in 16 bits in Hugging Face's safetensors layout. All ranks must call.

    The result is `model.safetensors`, or `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. It
    holds what `module.to(dtype).state_dict()` would: floating parameters (from their masters) and persistent floating
    buffers (rank 0's) cast to nearest even, other tensors as they are. Tied tensors are written once; their other names
    stand in the files' metadata, and `safetensors.torch.load_model` ties them again. A Hugging Face model also gets
    `config.json` and `generation_config.json`, so that `from_pretrained(directory)` loads it.

    A weight that `quantize_frozen` has packed is written under its own name, with the values that its bytes stand for,
    so that plain models load it; such weights are gathered packed, and unpacked one at a time.

    Every rank writes its own byte ranges (on a mesh that replicates, those of the first replica do), also of the whole
    tensors that DTensors are parts of; none needs more memory than its shard and 4 MiB. Ranks that do not see the
    directory (no shared file system) send their part to rank 0. An older export in the directory stays whole until this
    one is complete, and stays when anything fails.

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
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
    if getattr(model, "_zeropg", None) is None:
        raise TypeError(
            f"{_OPERATION}: expected a model sharded by zeropg.fully_shard, got {type(model).__name__}; shard it "
            "first, or save a plain module with safetensors.torch.save_model"
        )
    state = unchecked_state_of(model, _OPERATION)
    group: dist.ProcessGroup = state.parallel.everybody
    plan: ExportPlan | None = None

    def announce() -> dict[str, Any]:
        nonlocal plan
        plan = make_plan(state, directory, dtype, max_shard_size)
        return {"arguments": plan.arguments, "token": secrets.token_hex(8)}

    announced: list[dict[str, Any]] = together(group, _OPERATION, announce)
    assert plan is not None  # otherwise the line above has raised
    check_same(group, _OPERATION, [entry["arguments"] for entry in announced])
    state.settle_writes("save_16bit_weights")
    files = StagedFiles(plan.directory, plan.layout, announced[0]["token"])
    export = _Export(state, plan, files)
    try:
        export.run(dtype)
    finally:
        files.close(is_committed=export.is_committed)


class _Export:
    """One rank's part in one export. `run` is the protocol; every step ends when all ranks have told how it went."""

    def __init__(self, state: ShardedState, plan: ExportPlan, files: StagedFiles) -> None:
        self.is_committed = False
        self._model = state.model
        self._core = state.core
        self._parallel = state.parallel
        self._group: dist.ProcessGroup = state.parallel.everybody
        self._is_in_first_replica = state.core.replica == 0
        self._plan = plan
        self._files = files
        self._places = plan.layout.places  # a new list in each access
        # Elements of each tensor that this rank has written or sent.
        self._written = torch.zeros(len(plan.tensors), dtype=torch.int64)
        self._advance: Callable[[int], None] = lambda written_bytes: None

    def run(self, dtype: torch.dtype) -> None:
        is_first = self._group.rank() == 0
        self._together(lambda: self._create(dtype) if is_first else None)
        sees_files = self._together(lambda: is_first or self._files.open())
        share = self._plan.layout.tensor_bytes // self._group.size()
        with progress(_OPERATION, share, is_shown=is_first) as self._advance:
            self._together(lambda: self._write_own() if sees_files[self._group.rank()] else None)
            for rank, sees in enumerate(sees_files):
                if not sees:
                    stream_to_first(self._group, _OPERATION, rank, self._own_ranges, self._files.write)
            self._write_packed([rank for rank, sees in enumerate(sees_files) if sees])
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
            names = [tensor.name for tensor in self._plan.tensors]
            numel = sum(tensor.value.numel() for tensor in self._plan.tensors)
            self._files.add_index(index_json(names, numel, self._plan.layout))

    def _own_ranges(self) -> Iterator[ByteRange]:
        """Yields this rank's masters, the part that is exported. The first replica writes for all."""
        if not self._is_in_first_replica:
            return
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for name, flat, start, stop in local_shards(self._model):
            index = self._plan.index_of.get(name)
            if index is None and name in names:
                continue  # the model's _keys_to_ignore_on_save
            fits = index is not None and stop <= math.prod(cut_of(self._plan.tensors[index].value).sizes)
            if index is None or not fits or flat.numel() != stop - start:
                raise RuntimeError(f"the shard [{start}, {stop}) of '{name}' does not fit the model's parameters")
            if self._parallel.is_first_of(self._plan.tensors[index].value):
                yield from self._ranges(index, start, flat)
                self._written[index] += stop - start

    def _ranges(self, index: int, start: int, flat: torch.Tensor) -> Iterator[ByteRange]:
        tensor, place = self._plan.tensors[index], self._places[index]
        return byte_ranges(place.file, place.offset, cut_of(tensor.value), start, flat, tensor.dtype)

    def _write_own(self) -> None:
        for part in self._own_ranges():
            self._write(part)

    def _write_packed(self, writers: list[int]) -> None:
        """Gathers the bytes of packed weights, one flat parameter at a time; the ranks that write share the weights."""
        packed = {id(t.packed.packed_weight): at for at, t in enumerate(self._plan.tensors) if t.packed is not None}
        flat_groups: list[Any] = self._core.flat_groups if packed else []
        for group in flat_groups:
            slots = [(packed.pop(id(p)), at, numel) for _, p, at, numel in group.slots if id(p) in packed]
            if slots:
                whole = group.gather_master()
                parts = [(index, whole[at : at + numel]) for index, at, numel in slots]
                self._together(functools.partial(self._write_unpacked, parts, writers))
        ignored = [(index, self._packed_layer(index).packed_weight.detach()) for index in packed.values()]
        self._together(functools.partial(self._write_unpacked, ignored, [0]))

    def _write_unpacked(self, parts: list[tuple[int, torch.Tensor]], writers: list[int]) -> None:
        for number, (index, packed) in enumerate(parts):
            if writers[number % len(writers)] == self._group.rank():
                values = self._packed_layer(index).unpacked(packed, self._plan.tensors[index].dtype).view(-1)
                for part in self._ranges(index, 0, values):
                    self._write(part)
                self._written[index] += values.numel()

    def _packed_layer(self, index: int) -> PackedLayer:
        layer = self._plan.tensors[index].packed
        assert layer is not None
        return layer

    def _write(self, part: ByteRange) -> None:
        self._files.write(part)
        self._advance(part.size_bytes)

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
            if total < tensor.value.numel() and self._group.rank() == 0:
                for part in self._ranges(index, 0, tensor.value.detach().reshape(-1)):
                    self._write(part)
        self._files.finish()
