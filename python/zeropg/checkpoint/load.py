"""One rank's part in loading a checkpoint: its own byte ranges, whatever ranks had written them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zeropg._native import _C
from zeropg.checkpoint.debts import is_debt_file, load_debts, taken_debt_files
from zeropg.checkpoint.folder import reading
from zeropg.checkpoint.foreign import describe_foreign
from zeropg.checkpoint.load_masters import Advance
from zeropg.checkpoint.manifest import Manifest, SavedOptimizer, SavedTensor, read_manifest
from zeropg.checkpoint.optimizers import check_same_names, own_words
from zeropg.checkpoint.plan import ModelPlan, group_names, optimizer_kind, plan_model
from zeropg.checkpoint.residuals import is_residual_file, load_residuals, residual_file
from zeropg.checkpoint.structure import decode, fetch_scalar
from zeropg.checkpoint.structure_file import read_structure_file
from zeropg.checkpoint.values import put_whole
from zeropg.optim.flat_update import segments_of
from zeropg.optim.shard_optimizer import ShardedOptimizer, StateShard
from zeropg.sharding.state import ShardedState

_PIECE_BYTES = 4 << 20
_LISTED = 5  # names in an error; the rest is counted


class Loading:
    """Opens the checkpoint and compares it with the model; reads nothing yet. Nothing here communicates.

    Raises FileNotFoundError, ValueError or OSError as `load_checkpoint` says, before anything is changed.
    """

    def __init__(self, directory: Path, state: ShardedState, optimizers: Mapping[str, ShardedOptimizer]) -> None:
        self._directory = directory
        self._state = state
        self._optimizers = optimizers
        self._plan = plan_model(state)
        self._readers: dict[str, _C.FileReader] = {}
        self._modules: dict[str, Any] = {}
        self._is_changing = False
        self._resources = ExitStack()
        while True:
            self._manifest = _read_manifest(directory)
            self._saved_names = _match(self._manifest, self._plan)  # by index of the plan's tensors
            if optimizers and self._manifest.optimizers:
                check_same_names(self._manifest.optimizers, optimizers)
                for name, saved in self._manifest.optimizers.items():
                    _match_optimizer(name, saved, optimizers[name], self._plan, self._saved_names)
            try:
                self._open()
                return
            except FileNotFoundError:
                # Another job may have replaced the checkpoint meanwhile, and removed what the manifest named.
                if _read_manifest(directory).folder == self._manifest.folder:
                    raise

    def _open(self) -> None:
        data = self._directory / self._manifest.folder
        try:
            self._resources.enter_context(reading(data))
            for name, file in self._manifest.files.items():
                if self._is_needed(name):
                    self._readers[name] = _C.FileReader(
                        str(data / name), file.size_bytes, self._manifest.chunk_bytes, file.checksums
                    )
        except BaseException:
            self.close()
            raise

    def announcement(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {f"the checkpoint in '{self._directory}'": self._manifest.folder}

    def own_bytes(self) -> int:
        """About how much this rank will read."""
        world_size = self._state.core.world_size if self._state.core.stage > 0 else 1
        return sum(reader.bytes for reader in self._readers.values()) // world_size

    def read_extras(self) -> tuple[Any, Any]:
        content = read_structure_file(self._readers["extra.safetensors"], {"extra", "modules"})
        self._modules = content["modules"]
        own = self._readers.get(self._rank_file())
        rank_extra = None if own is None else read_structure_file(own, {"rank_extra"})["rank_extra"]
        return content["extra"], rank_extra

    def read_model(self, advance: Advance) -> None:
        """Sets masters, parameters and buffers; between the core's begin_step and end_load."""
        self._is_changing = True
        with torch.no_grad():
            groups: list[Any] = list(self._state.core.flat_groups)
            for group in groups:
                slot_of = {id(parameter): slot for slot, (_, parameter, _, _) in enumerate(group.slots)}
                for segment in segments_of(group):
                    saved = self._saved_tensor(self._plan.index_of[segment.name])
                    for start, values in self._pieces(saved, segment.offset, segment.offset + segment.numel):
                        group.load(slot_of[id(segment.parameter)], values, start)
                        advance(values.nbytes)
            for index, tensor in enumerate(self._plan.tensors):
                if not tensor.is_sharded:
                    saved = self._saved_tensor(index)
                    for start, values in self._pieces(saved, 0, saved.numel):
                        put_whole(tensor.value.detach(), start, values)
                        advance(values.nbytes)
        own = self._readers.get(residual_file(self._state.core.rank))
        load_residuals(self._state.core, None if own is None else read_structure_file(own, {"residuals"}))
        modules = dict(self._state.model.named_modules())
        for name, extra_state in self._modules.items():
            if name in modules:
                modules[name].set_extra_state(extra_state)

    def read_optimizers(self, advance: Advance, failure: Exception | None) -> None:
        """Sets the optimizers' state and param groups. Raises `failure`, of read_model, if there is one."""
        try:
            if failure is not None:
                raise failure
            former = self._manifest.world_size
            debts = [
                read_structure_file(reader, {"debts"})["debts"]
                for file, reader in self._readers.items()
                if is_debt_file(file)
            ]
            for name, saved in self._manifest.optimizers.items() if self._optimizers else ():
                self._read_optimizer(saved, self._optimizers[name], advance)
                load_debts(self._optimizers[name], [each[name] for each in debts if name in each], former)
        except (ValueError, OSError) as error:
            text = f"{error}; the model holds old and new values now: load a checkpoint before you use it"
            raise (ValueError if isinstance(error, ValueError) else OSError)(text) from error

    def _read_optimizer(self, saved: SavedOptimizer, optimizer: ShardedOptimizer, advance: Advance) -> None:
        # First what decides which state there is, such as amsgrad and momentum.
        for entry, group in zip(saved.groups, optimizer.param_groups, strict=True):
            group.update({key: decode(value, fetch_scalar) for key, value in entry.items() if key != "params"})
        optimizer.load_local_state(self._state_shards(saved, optimizer, advance), self._numbers(saved, optimizer))

    def warn(self) -> None:
        """Says what the user may not expect; once, on rank 0."""
        if self._optimizers and not self._manifest.optimizers:
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' was saved without an optimizer; yours stays as it is",
                stacklevel=3,
            )
        world_size = self._state.core.world_size
        if self._manifest.world_size != world_size and any(name.startswith("rank-") for name in self._manifest.files):
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' was saved by {self._manifest.world_size} ranks, now "
                f"there are {world_size}: each gets the rank_extra of the old rank of its number, or None; what "
                "depends on the number of ranks, such as a sampler's position, does not fit any more",
                stacklevel=3,
            )

        has_residuals = any(is_residual_file(name) for name in self._manifest.files)
        if self._manifest.world_size != world_size and has_residuals and self._state.core.residuals is not None:
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' was saved by {self._manifest.world_size} ranks, now "
                f"there are {world_size}: what compression still owed to the gradients is dropped",
                stacklevel=3,
            )

    def close(self) -> None:
        self._readers.clear()
        self._resources.close()

    def _rank_file(self) -> str:
        return f"rank-{self._state.core.rank:05d}.safetensors"

    def _is_needed(self, name: str) -> bool:
        if name.startswith("rank-"):
            return name == self._rank_file()
        if is_residual_file(name):
            # Others would be of another rank's part of the gradients.
            is_same_world = self._manifest.world_size == self._state.core.world_size
            return is_same_world and name == residual_file(self._state.core.rank)
        if is_debt_file(name):
            core = self._state.core
            taken = taken_debt_files(core.rank, core.world_size, self._manifest.world_size)
            return bool(self._optimizers) and name in taken
        return bool(self._optimizers) or not name.startswith("optimizer")

    def _saved_tensor(self, index: int) -> SavedTensor:
        return self._manifest.tensors[self._saved_names[index]]

    def _pieces(self, saved: SavedTensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values) of elements [start, stop); each tensor is valid until the next."""
        step = _PIECE_BYTES // saved.dtype.itemsize
        buffer = torch.empty(min(step, stop - start), dtype=saved.dtype)
        reader = self._readers[saved.file]
        for at in range(start, stop, step):
            values = buffer[: min(step, stop - at)]
            reader.read(saved.offset + at * saved.dtype.itemsize, saved.dtype, values)
            yield at, values

    def _kept(self, optimizer: ShardedOptimizer) -> Iterator[tuple[str, str, int, int]]:
        """Yields (parameter name, its name in the checkpoint, start, stop) of what this rank keeps state for."""
        for name, (start, stop) in optimizer.local_ranges().items():
            yield name, self._saved_names[self._plan.index_of[name]], start, stop

    def _state_shards(
        self, saved: SavedOptimizer, optimizer: ShardedOptimizer, advance: Advance
    ) -> Iterator[StateShard]:
        for name, saved_name, start, stop in self._kept(optimizer):
            for key, tensor in saved.tensors.get(saved_name, {}).items():
                for at, values in self._pieces(tensor, start, stop):
                    yield StateShard(name, key, values, at, at + values.numel())
                    advance(values.nbytes)

    def _numbers(self, saved: SavedOptimizer, optimizer: ShardedOptimizer) -> Iterator[tuple[str, str, Any]]:
        for name, saved_name, _, _ in self._kept(optimizer):
            for key, value in saved.numbers.get(saved_name, {}).items():
                yield name, key, decode(value, fetch_scalar)


def _read_manifest(directory: Path) -> Manifest:
    try:
        return read_manifest(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"'{directory}' holds no checkpoint of zeropg.save_checkpoint that this rank sees: "
            f"{describe_foreign(directory)}"
        ) from error


def _match(manifest: Manifest, plan: ModelPlan) -> list[str]:
    """Returns the name in the checkpoint of each tensor of the model. Raises ValueError listing what differs."""
    names_of: dict[int, list[str]] = {}
    for name, index in plan.index_of.items():
        names_of.setdefault(index, []).append(name)
    found: list[str] = []
    used: set[str] = set()
    missing, misshapen = [], []
    for index, tensor in enumerate(plan.tensors):
        known = [manifest.aliases.get(name, name) for name in names_of[index]]
        saved_name = next((name for name in known if name in manifest.tensors), None)
        if saved_name is None:
            missing.append(tensor.name)
            continue
        saved = manifest.tensors[saved_name]
        used.update(known)
        if saved.shape != tuple(tensor.value.shape) or saved.dtype.is_floating_point != tensor.dtype.is_floating_point:
            misshapen.append(
                f"{tensor.name} ({saved.dtype} {list(saved.shape)}, here {tensor.dtype} {list(tensor.value.shape)})"
            )
        found.append(saved_name)
    unexpected = [name for name in manifest.tensors if name not in used]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("not in the checkpoint", missing),
            ("not in the model", unexpected),
            ("of another shape or kind", misshapen),
        )
        if names
    ]
    if problems:
        raise ValueError(f"the checkpoint is of another model; {'; '.join(problems)}")
    return found


def _match_optimizer(
    name: str, saved: SavedOptimizer, optimizer: ShardedOptimizer, plan: ModelPlan, saved_names: list[str]
) -> None:
    """Raises ValueError where the optimizer is another than the saved one of that name."""
    which = f"the checkpoint's optimizer{own_words(name)}"
    kind = optimizer_kind(optimizer)
    if saved.kind != kind:
        raise ValueError(
            f"{which} is a {saved.kind}, yours a {kind}; make one of that class, or pass optimizer=None to load the "
            "model alone"
        )
    here = [[saved_names[plan.index_of[own]] for own in names] for names in group_names(optimizer, plan)]
    if len(here) != len(saved.groups):
        raise ValueError(f"{which} has {len(saved.groups)} param groups, yours {len(here)}")
    for index, (names, entry) in enumerate(zip(here, saved.groups, strict=True)):
        theirs = set(entry["params"])
        only_here, only_there = [n for n in names if n not in theirs], sorted(theirs - set(names))
        if only_here or only_there:
            raise ValueError(
                f"param group {index} holds other parameters than that of {which}; only here: {_listed(only_here)}; "
                f"only there: {_listed(only_there)}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more
