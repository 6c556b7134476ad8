"""One rank's part in one save of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.checkpoint.debts import debt_file, saved_debts
from zeropg.checkpoint.folder import CheckpointFolder
from zeropg.checkpoint.manifest import ALONE, Manifest, SavedFile
from zeropg.checkpoint.optimizers import Optimizers, named_optimizers, own_words
from zeropg.checkpoint.pending import join_saves
from zeropg.checkpoint.plan import (
    ModelPlan,
    OptimizerPlan,
    digest,
    encode_groups,
    kinds_of,
    local_signatures,
    optimizer_kind,
    plan_model,
    plan_optimizer,
)
from zeropg.checkpoint.residuals import residual_file, saved_residuals
from zeropg.checkpoint.structure_file import StructureFile, make_structure_file
from zeropg.export.plan import has_extra_state
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.agreement import check_same, together
from zeropg.rank_io.checksums import Told, joined, told
from zeropg.rank_io.directory_path import directory_path
from zeropg.rank_io.parallel_files import ByteRange, FileSpec, ParallelFiles
from zeropg.rank_io.progress import progress
from zeropg.rank_io.store_agreement import StoreAgreement, patience_of, store_of
from zeropg.rank_io.stream import stream_to_first
from zeropg.sharding.state import ShardedState
from zeropg.tensor_parallel.distributed import is_distributed, placements_text

OPERATION = "save_checkpoint"
# Small: a chunk in which the parts of two ranks meet is read by both.
_SMALLEST_CHUNK_BYTES = 1 << 18
_SAMPLED = 1 << 12  # elements of a parameter that each rank has for itself
_SAMPLE_LETTERS = 8  # of their digest
_MOST_CHUNKS = 1 << 16  # so that the checksums of a checkpoint of any size are some hundred KB of text

Agree = Callable[[Callable[[], Any]], list[Any]]


class Save:
    """One rank's part in one save. Every step ends when all ranks have told how it went."""

    def __init__(self, state: ShardedState, optimizer: Optimizers | None, exclude_frozen: bool) -> None:
        self._group: dist.ProcessGroup = state.parallel.everybody
        self.rank = self._group.rank()
        self.directory = Path()
        self._state = state
        self._given = optimizer
        self._exclude_frozen = exclude_frozen
        self._optimizers: dict[str, ShardedOptimizer] = {}
        self._model_plan: ModelPlan | None = None
        self._optimizer_plans: dict[str, OptimizerPlan] = {}
        self._own_files: dict[str, StructureFile] = {}  # those that this rank writes alone
        self._names: list[str] = []
        self._sees_files: list[bool] = []
        self._chunk_bytes = _SMALLEST_CHUNK_BYTES
        self._snapshot: list[ByteRange] | None = None

    # --- on the thread that trains ---

    def announce(self, directory: str | os.PathLike[str], extra: Any, rank_extra: Any, async_save: bool) -> None:
        """Checks the arguments here and between the ranks, and lays out the files. Collective."""
        announced = together(
            self._group, OPERATION, lambda: self._announcement(directory, extra, rank_extra, async_save)
        )
        check_same(self._group, OPERATION, [entry["arguments"] for entry in announced])
        assert self._model_plan is not None  # otherwise the lines above have raised
        self._warn_of_ranks_own(self._model_plan, [entry["ignored"] for entry in announced])
        layouts = [self._model_plan.layout]
        for index, (name, optimizer) in enumerate(self._optimizers.items()):
            plan = plan_optimizer(
                optimizer_kind(optimizer),
                self._groups[name],
                self._model_plan,
                [entry["states"][name] for entry in announced],
                stem="optimizer" if name == ALONE else f"optimizer-{index}",
                prefix="" if name == ALONE else f"{name}/",
            )
            self._optimizer_plans[name] = plan
            layouts.append(plan.layout)
        shared = [(file.name, file.bytes, file.header) for layout in layouts for file in layout.files]
        own = [(name, size, b"") for entry in announced for name, size in entry["own_files"].items()]
        self._names = [name for name, _, _ in shared + own]
        total_bytes = sum(size for _, size, _ in shared + own)
        while total_bytes / self._chunk_bytes > _MOST_CHUNKS:
            self._chunk_bytes *= 2
        self._token = announced[0]["token"]
        self._folder = CheckpointFolder(self.directory, self._token)
        self._specs = [
            FileSpec(str(self._folder.data / name), size, header, is_shared=index < len(shared))
            for index, (name, size, header) in enumerate(shared + own)
        ]
        self._files = ParallelFiles(self._specs, chunk_bytes=self._chunk_bytes)
        self._is_async = async_save

    def _announcement(
        self, directory: str | os.PathLike[str], extra: Any, rank_extra: Any, async_save: bool
    ) -> dict[str, Any]:
        if not isinstance(async_save, bool):
            raise TypeError(f"async_save is {async_save!r}, expected True or False")
        self._state.check_modules(OPERATION)
        self._optimizers = named_optimizers(self._given, self._state.model, OPERATION)
        self.directory = directory_path(directory)
        self._model_plan = plan_model(self._state, exclude_frozen=self._exclude_frozen)
        self._refuse_debts_of_parts(self._model_plan)
        if self.rank == 0:
            content = {"extra": extra, "modules": _extra_states(self._state.model)}
            self._own_files["extra.safetensors"] = make_structure_file(content)
        if rank_extra is not None:
            self._own_files[f"rank-{self.rank:05d}.safetensors"] = make_structure_file({"rank_extra": rank_extra})
        residuals = saved_residuals(self._state.core)
        if residuals is not None:
            self._own_files[residual_file(self.rank)] = make_structure_file(residuals)
        debts = saved_debts(self._optimizers)
        if debts is not None:
            self._own_files[debt_file(self.rank)] = make_structure_file(debts)
        arguments = {
            "directory": str(self.directory),
            "async_save": str(async_save),
            "the model's tensors (digest)": digest(self._model_plan.described()),
            "optimizer": kinds_of(self._optimizers),
        }
        self._groups = {name: encode_groups(one, self._model_plan) for name, one in self._optimizers.items()}
        for name, groups in self._groups.items():
            arguments[f"the optimizer{own_words(name)}'s param_groups (digest)"] = digest(groups)
        join_saves(self._state, self.directory)  # after the checks: its errors are of the save before
        return {
            "arguments": arguments,
            "states": {name: local_signatures(one, self._model_plan) for name, one in self._optimizers.items()},
            "own_files": {name: file.size_bytes for name, file in self._own_files.items()},
            "token": secrets.token_hex(8),
            "ignored": self._samples(self._model_plan),
        }

    def _refuse_debts_of_parts(self, plan: ModelPlan) -> None:
        """Which elements a rank owes something to is counted in its parts of tensors, and others have other parts."""
        if not self._state.parallel.dimensions:
            return
        if saved_residuals(self._state.core) is not None or saved_debts(self._optimizers) is not None:
            part = next(tensor for tensor in plan.tensors if is_distributed(tensor.value))
            raise NotImplementedError(
                "compression owes something to gradients or momenta, and the model is tensor-parallel: "
                f"'{part.name}' is a DTensor ({placements_text(part.value)}); a checkpoint holds debts to whole "
                "tensors only: train without compression, or without tensor parallelism"
            )

    def _samples(self, plan: ModelPlan) -> str:
        """Of each ignored parameter, in the plan's order; short, since there may be tens of thousands (experts)."""
        return "" if self._group.size() == 1 else "".join(_sample(p) for _, p in _ignored_here(plan))

    def _warn_of_ranks_own(self, plan: ModelPlan, samples: list[str]) -> None:
        if self._group.size() == 1:
            return
        spans = [slice(at, at + _SAMPLE_LETTERS) for at in range(0, len(samples[0]), _SAMPLE_LETTERS)]
        named = zip(_ignored_here(plan), spans, strict=True)
        differing = [name for (name, _), span in named if len({text[span] for text in samples}) > 1]
        if differing and self.rank == 0:
            warnings.warn(
                f"[zeropg] {OPERATION}: {len(differing)} ignored parameters have other values on other ranks "
                f"({', '.join(differing[:3])}{', ...' if len(differing) > 3 else ''}), and the checkpoint has those of "
                "rank 0; put each rank's own, and their optimizer state, into rank_extra=, and set them after the load",
                stacklevel=4,
            )

    def create(self) -> None:
        """Makes the files, as many ranks open them as see them. Collective."""
        self._together(lambda: self._create() if self.rank == 0 else None)
        self._sees_files = self._together(lambda: self.rank == 0 or self._files.open())
        if self._is_async and not all(self._sees_files):
            blind = ", ".join(str(rank) for rank, sees in enumerate(self._sees_files) if not sees)
            raise NotImplementedError(
                f"[zeropg rank {self.rank}/{self._group.size()}] {OPERATION}: ranks {blind} do not see the files that "
                f"rank 0 made in '{self.directory}', and a background save cannot send them; use a shared file system, "
                "or async_save=False"
            )

    def _create(self) -> None:
        self._folder.create()
        self._files.create()

    def write_and_commit(self) -> None:
        """Collective."""
        share = sum(spec.size_bytes for spec in self._specs) // self._group.size()
        for rank, sees in enumerate(self._sees_files):
            if not sees:
                stream_to_first(self._group, OPERATION, rank, self._own_ranges, self._files.write)
        with progress(OPERATION, share, is_shown=self.rank == 0) as advance:
            self._finish(self._together, self._own_ranges() if self._sees_files[self.rank] else iter(()), advance)

    def snapshot(self) -> None:
        """Copies what this rank will write. Collective."""
        self._together(self._take_snapshot)
        store = store_of(self._group)
        self._agreement = None
        if self._group.size() > 1:
            if store is None:
                raise NotImplementedError(
                    f"[zeropg rank {self.rank}/{self._group.size()}] {OPERATION}: async_save=True needs the store of "
                    "the process group, and torch knows none for it; make the group with torch.distributed.new_group, "
                    "or use async_save=False"
                )
            name = f"checkpoint/{self._token}"
            patience = patience_of(self._group)
            self._agreement = StoreAgreement(store, name, self.rank, self._group.size(), OPERATION, patience)

    def _take_snapshot(self) -> None:
        self._snapshot = [
            part._replace(values=part.values.detach().to(device="cpu", dtype=part.dtype, copy=True))
            for part in self._live_ranges()
        ]
        self._snapshot += self._own_file_ranges()  # nobody changes these: they are copies

    def close(self) -> None:
        self._snapshot = None
        self._own_files = {}
        self._files.close()
        if self.rank == 0:
            # Not the others: rank 0 may be committing while they have lost it. The next save removes what is left.
            self._folder.close()

    # --- on the thread that trains, or in the background ---

    def write_in_background(self) -> None:
        assert self._snapshot is not None
        ranges = iter(self._snapshot)
        if self._agreement is None:
            self._finish(lambda action: [action()], ranges, lambda written_bytes: None)
            return
        self._agreement.start()
        try:
            self._finish(self._agreement.together, ranges, lambda written_bytes: None)
        finally:
            self._agreement.finish()

    def _finish(self, agree: Agree, ranges: Iterator[ByteRange], advance: Callable[[int], None]) -> None:
        everybodys = agree(lambda: self._write(ranges, advance))
        agree(lambda: self._commit(everybodys) if self.rank == 0 else None)

    def _write(self, ranges: Iterator[ByteRange], advance: Callable[[int], None]) -> list[Told]:
        for part in ranges:
            self._files.write(part)
            advance(part.size_bytes)
        self._files.sync()
        return [
            told(pieces, self._chunk_bytes, spec.size_bytes)
            for pieces, spec in zip(self._files.checksums(), self._specs, strict=True)
        ]

    def _commit(self, everybodys: list[list[Told]]) -> None:
        files: dict[str, SavedFile] = {}
        for name, spec, ranks_own in zip(self._names, self._specs, zip(*everybodys, strict=True), strict=True):
            try:
                checksums = joined(ranks_own, self._chunk_bytes, spec.size_bytes)
            except ValueError as error:
                raise RuntimeError(f"'{name}': {error}; this is a fault of zeropg, please report it") from error
            files[name] = SavedFile(spec.size_bytes, checksums)
        self._folder.commit(self._manifest(files))

    # --- both ---

    def _manifest(self, files: dict[str, SavedFile]) -> Manifest:
        plan = self._model_plan
        assert plan is not None
        core = self._state.core
        return Manifest(
            folder=self._folder.data.name,
            origin={
                "torch": torch.__version__,
                "world_size": self._group.size(),
                "replicas": core.replicas,
                "stage": core.stage,
                "placements": {
                    "flat ranges over all ranks": sum(plan.tensors[index].is_sharded for index in plan.places),
                    "whole, from rank 0": [
                        plan.tensors[index].name for index in plan.places if not plan.tensors[index].is_sharded
                    ],
                    **({"of the parts of": placements} if (placements := plan.placements()) else {}),
                },
            },
            world_size=self._group.size(),
            chunk_bytes=self._chunk_bytes,
            files=files,
            tensors=plan.saved(),
            aliases=plan.aliases,
            optimizers={name: optimizer_plan.saved() for name, optimizer_plan in self._optimizer_plans.items()},
            left_out=plan.left_out,
        )

    def _own_ranges(self) -> Iterator[ByteRange]:
        yield from self._live_ranges()
        yield from self._own_file_ranges()

    def _live_ranges(self) -> Iterator[ByteRange]:
        """Of the model's and the optimizers' own tensors, which go on changing."""
        assert self._model_plan is not None
        if self._state.core.replica > 0:
            return  # the first replica writes the same
        yield from self._model_plan.ranges(self._state.model, is_first=self.rank == 0)
        first_file = len(self._model_plan.layout.files)
        for name, plan in self._optimizer_plans.items():
            yield from plan.ranges(self._optimizers[name], first_file)
            first_file += len(plan.layout.files)

    def _own_file_ranges(self) -> Iterator[ByteRange]:
        for name, file in self._own_files.items():
            yield from file.ranges(self._names.index(name))

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return together(self._group, OPERATION, action)


def _sample(parameter: torch.Tensor) -> str:
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()[:_SAMPLE_LETTERS]


def _ignored_here(plan: ModelPlan) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in plan.ignored() if type(p) is nn.Parameter]


def _extra_states(model: nn.Module) -> dict[str, Any]:
    return {name: module.get_extra_state() for name, module in model.named_modules() if has_extra_state(module)}
