"""One rank's part in loading a checkpoint: its own byte ranges, whatever ranks had written them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zeropg._native import _C
from zeropg.checkpoint.debts import debt_file, is_debt_file, load_debts
from zeropg.checkpoint.folder import reading
from zeropg.checkpoint.load_masters import Advance, set_values
from zeropg.checkpoint.manifest import SavedOptimizer, SavedTensor
from zeropg.checkpoint.match import check_groups, listed, match_tensors
from zeropg.checkpoint.optimizers import check_same_names, own_words
from zeropg.checkpoint.plan import ModelPlan, group_names, kinds_of, optimizer_kind, plan_model
from zeropg.checkpoint.regular_file import check_no_pipe
from zeropg.checkpoint.residuals import is_residual_file, load_residuals, residual_file
from zeropg.checkpoint.saved_tensors import manifest_in, read_into_place, read_pieces
from zeropg.checkpoint.structure import decode, fetch_scalar
from zeropg.checkpoint.structure_file import read_structure_file
from zeropg.optim.kernels import STORAGE_OPTIONS
from zeropg.optim.normal_tensors import normal_tensors
from zeropg.optim.saved_state import StateShard
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.optim.update.entries import FACTORS
from zeropg.sharding.state import ShardedState


class Loading:
    """Opens the checkpoint and compares it with the model; reads nothing yet. Nothing here communicates.

    Raises FileNotFoundError, ValueError or OSError as `load_checkpoint` says, before anything is changed.
    """

    def __init__(
        self,
        directory: Path,
        state: ShardedState,
        optimizers: Mapping[str, ShardedOptimizer],
        *,
        strict: bool = True,
        reads_model: bool = True,
    ) -> None:
        """strict: as load_checkpoint's. reads_model: False: masters, parameters and buffers stay as they are."""
        self._directory = directory
        self._state = state
        self._optimizers = optimizers
        self._plan = plan_model(state)
        self._rank, self._world_size = state.parallel.everybody.rank(), state.parallel.everybody.size()
        self._readers: dict[str, _C.FileReader] = {}
        self._modules: dict[str, Any] = {}
        self._is_changing = False
        self._strict = strict
        self._reads_model = reads_model
        self._resources = ExitStack()
        while True:
            self._manifest = manifest_in(directory)
            self._saved_names = match_tensors(
                self._manifest.tensors,
                self._manifest.aliases,
                self._plan,
                strict=strict and reads_model,
                may_miss=self._manifest.left_out,
            )
            if optimizers and state.parallel.dimensions and any(map(is_debt_file, self._manifest.files)):
                raise NotImplementedError(
                    f"'{directory}' holds what ranks owed to momenta that they average, as elements of whole tensors, "
                    "and the model is tensor-parallel; load it into one that is not, or pass optimizer=None"
                )
            if optimizers and self._manifest.optimizers:
                check_same_names(self._manifest.optimizers, optimizers)
                for name, saved in self._manifest.optimizers.items():
                    _match_optimizer(name, saved, optimizers[name], self._plan, self._saved_names)
            try:
                self._open()
                return
            except FileNotFoundError:
                # Another job may have replaced the checkpoint meanwhile, and removed what the manifest named.
                if manifest_in(directory).folder == self._manifest.folder:
                    raise

    def _open(self) -> None:
        data = self._directory / self._manifest.folder
        try:
            self._resources.enter_context(reading(data))
            for name, file in self._manifest.files.items():
                if self._is_needed(name):
                    check_no_pipe(data / name)
                    self._readers[name] = _C.FileReader(
                        str(data / name), file.size_bytes, self._manifest.chunk_bytes, file.checksums
                    )
        except BaseException:
            self.close()
            raise

    def announcement(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {
            "the checkpoint (its inner folder)": self._manifest.folder,
            "optimizer": kinds_of(self._optimizers),
            "strict": str(self._strict),
        }

    def own_bytes(self) -> int:
        """About how much this rank will read."""
        shards = self._state.core.shards if self._state.core.stage > 0 else 1
        return sum(reader.bytes for reader in self._readers.values()) // shards

    def read_extras(self) -> tuple[Any, Any]:
        content = read_structure_file(self._readers["extra.safetensors"], {"extra", "modules"})
        self._modules = content["modules"]
        own = self._readers.get(self._rank_file())
        rank_extra = None if own is None else read_structure_file(own, {"rank_extra"})["rank_extra"]
        return content["extra"], rank_extra

    def read_model(self, advance: Advance) -> None:
        """Sets masters, parameters and buffers; between the core's begin_step and end_load."""
        self._is_changing = True
        set_values(
            self._state,
            self._plan,
            self._pieces_of,
            advance,
            self._into_place,
        )
        if not self._reads_model:
            return
        residuals = [
            read_structure_file(reader, {"residuals"})
            for name, reader in self._readers.items()
            if is_residual_file(name)
        ]
        load_residuals(self._state.core, residuals, self._manifest.world_size)
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
            kept = ("params", *STORAGE_OPTIONS)
            group.update({key: decode(value, fetch_scalar) for key, value in entry.items() if key not in kept})
        with normal_tensors():
            optimizer.load_local_state(self._state_shards(saved, optimizer, advance), self._numbers(saved, optimizer))

    def warn(self) -> None:
        """Says what the user may not expect; once, on rank 0."""
        if self._optimizers and not self._manifest.optimizers:
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' was saved without an optimizer; yours stays as it is",
                stacklevel=3,
            )
        missed = [tensor.name for index, tensor in enumerate(self._plan.tensors) if index not in self._saved_names]
        if missed and self._reads_model:
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' holds no {listed(missed)}; yours stay as they are",
                stacklevel=3,
            )
        world_size = self._world_size
        if self._manifest.world_size != world_size and any(name.startswith("rank-") for name in self._manifest.files):
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' was saved by {self._manifest.world_size} ranks, now "
                f"there are {world_size}: each gets the rank_extra of the old rank of its number, or None; what "
                "depends on the number of ranks, such as a sampler's position, does not fit any more",
                stacklevel=3,
            )

        has_residuals = any(is_residual_file(name) for name in self._manifest.files)
        if not self._takes_residuals() and has_residuals and self._state.core.residuals is not None:
            warnings.warn(
                f"[zeropg] load_checkpoint: '{self._directory}' was saved by {self._manifest.world_size} ranks "
                f"({self._saved_replicas()} replicas), now there are {world_size} ({self._state.core.replicas}): what "
                "compression still owed to the gradients is dropped",
                stacklevel=3,
            )

    def close(self) -> None:
        self._readers.clear()
        self._resources.close()

    def _rank_file(self) -> str:
        return f"rank-{self._rank:05d}.safetensors"

    def _saved_replicas(self) -> int:
        return int(self._manifest.origin.get("replicas", 1))

    def _takes_residuals(self) -> bool:
        """Replicas encode sums over the shards of a slice: those of other slices would be of other sums."""
        core = self._state.core
        before, now = self._saved_replicas(), core.replicas
        is_parallel = bool(self._state.parallel.dimensions)  # then nobody has whole tensors, as they are of
        return before == now and (now == 1 or self._manifest.world_size == self._world_size) and not is_parallel

    def _former_ranks(self) -> range:
        """Those that saved whose own files this rank reads: its own one, or so that each one is read by one rank."""
        return range(self._rank, self._manifest.world_size, self._world_size)

    def _is_needed(self, name: str) -> bool:
        if name.startswith("rank-"):
            return name == self._rank_file()
        if is_residual_file(name):
            return self._takes_residuals() and name in map(residual_file, self._former_ranks())
        if is_debt_file(name):
            return bool(self._optimizers) and name in map(debt_file, self._former_ranks())
        return bool(self._optimizers) or not name.startswith("optimizer")

    def _pieces_of(self, index: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        name = self._saved_names.get(index) if self._reads_model else None
        return iter(()) if name is None else self._pieces(index, self._manifest.tensors[name], start, stop)

    def _into_place(self, index: int, start: int, room: torch.Tensor) -> Iterator[int] | None:
        name = self._saved_names.get(index) if self._reads_model else None
        saved = None if name is None else self._manifest.tensors[name]
        first = self._plan.tensors[index].cut.neighbours(start, start + room.numel())
        if saved is None or saved.dtype != room.dtype or not room.is_contiguous() or first is None:
            return None
        return read_into_place(self._readers[saved.file], saved, first, room)

    def _pieces(self, index: int, saved: SavedTensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements of this rank's part of the plan's tensor, or of a state of its shape."""
        source = functools.partial(read_pieces, self._readers[saved.file], saved)
        return self._plan.tensors[index].cut.read(source, start, stop)

    def _kept(self, optimizer: ShardedOptimizer) -> Iterator[tuple[str, str, int, int]]:
        """Yields (parameter name, its name in the checkpoint, start, stop) of what this rank keeps state for."""
        for name, (start, stop) in optimizer.local_ranges().items():
            yield name, self._saved_names.get(self._plan.index_of[name], name), start, stop

    def _state_shards(
        self, saved: SavedOptimizer, optimizer: ShardedOptimizer, advance: Advance
    ) -> Iterator[StateShard]:
        for name, saved_name, start, stop in self._kept(optimizer):
            index = self._plan.index_of[name]
            for key, tensor in saved.tensors.get(saved_name, {}).items():
                if key in FACTORS:
                    continue
                for at, values in self._pieces(index, tensor, start, stop):
                    yield StateShard(name, key, values, at, at + values.numel())
                    advance(values.nbytes)

    def _numbers(self, saved: SavedOptimizer, optimizer: ShardedOptimizer) -> Iterator[tuple[str, str, Any]]:
        """Yields what is not per element: numbers, and factors as whole tensors."""
        for name, saved_name, _, _ in self._kept(optimizer):
            for key, value in saved.numbers.get(saved_name, {}).items():
                yield name, key, decode(value, fetch_scalar)
            for key in saved.tensors.get(saved_name, {}).keys() & FACTORS:
                yield name, key, self._whole(saved.tensors[saved_name][key])

    def _whole(self, saved: SavedTensor) -> torch.Tensor:
        whole = torch.empty(saved.numel, dtype=saved.dtype)
        for at, values in read_pieces(self._readers[saved.file], saved, 0, saved.numel):
            whole[at : at + values.numel()] = values
        return whole.view(saved.shape)


def _match_optimizer(
    name: str, saved: SavedOptimizer, optimizer: ShardedOptimizer, plan: ModelPlan, saved_names: Mapping[int, str]
) -> None:
    """Raises ValueError where the optimizer is another than the saved one of that name."""
    which = f"the checkpoint's optimizer{own_words(name)}"
    kind = optimizer_kind(optimizer)
    if saved.kind != kind:
        raise ValueError(
            f"{which} is a {saved.kind}, yours a {kind}; make one of that class, or pass optimizer=None to load the "
            "model alone"
        )
    here = [[saved_names.get(plan.index_of[own], own) for own in names] for names in group_names(optimizer, plan)]
    check_groups(which, [entry["params"] for entry in saved.groups], here)
