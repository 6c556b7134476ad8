"""What a checkpoint of a model and its optimizer holds, and where it stands in the files. No communication."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropg._native import _C
from zeropg.checkpoint.manifest import SavedOptimizer, SavedTensor
from zeropg.checkpoint.structure import dtype_name, dtype_of, encode, keep_scalar
from zeropg.export.byte_ranges import byte_ranges
from zeropg.export.plan import named_tensors
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.parallel_files import ByteRange
from zeropg.sharding.access import local_shards
from zeropg.sharding.state import ShardedState
from zeropg.tensor_parallel.distributed import is_distributed, placements_text
from zeropg.tensor_parallel.pieces import Cut, cut_of, whole

# Files of this size: no file system refuses them, and few enough to open at once.
_MAX_FILE_BYTES = 16 << 30
_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or persistent buffer.

    dtype: of the master, or its own where nothing shards it. cut: which part of it this rank shards with others.
    is_saved_here: whether this rank saves of that part what it owns, and not another one that has the same part.
    """

    name: str
    value: torch.Tensor
    dtype: torch.dtype
    is_sharded: bool
    cut: Cut
    is_saved_here: bool


@dataclass(frozen=True)
class ModelPlan:
    """The model's tensors; the same on every rank but for `value`s."""

    tensors: list[ModelTensor]
    index_of: dict[str, int]  # every name of every tensor
    layout: _C.Layout
    places: dict[int, _C.TensorPlace]  # of the tensors that are saved

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied tensors that are saved."""
        of = {name: self.tensors[i].name for name, i in self.index_of.items() if i in self.places}
        return {name: saved for name, saved in of.items() if name != saved}

    @property
    def left_out(self) -> list[str]:
        """All names of tensors that are not saved."""
        return [name for name, index in self.index_of.items() if index not in self.places]

    def ignored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters that nothing shards and that are saved."""
        for index in self.places:
            tensor = self.tensors[index]
            if isinstance(tensor.value, nn.Parameter) and not tensor.is_sharded:
                yield tensor.name, tensor.value

    def described(self) -> list[Any]:
        """JSON that differs where ranks would write different files."""
        described = [(t.name, list(t.value.shape), str(t.dtype), t.is_sharded) for t in self.tensors]
        return [described, sorted(self.aliases.items()), sorted(self.left_out)]

    def saved(self) -> dict[str, SavedTensor]:
        pairs = [(self.tensors[index], place) for index, place in self.places.items()]
        return {t.name: _saved(self.layout, place, t.dtype, t.value.shape) for t, place in pairs}

    def ranges(self, model: nn.Module, *, is_first: bool) -> Iterator[ByteRange]:
        """Yields what a rank of the first replica writes: its part of the masters; rank 0 also what is not sharded."""
        for name, flat, start, _ in local_shards(model):
            index = self.index_of[name]
            if (place := self.places.get(index)) is not None and self.tensors[index].is_saved_here:
                yield from _ranges(place, self.tensors[index].cut, start, flat, flat.dtype)
        for index, place in self.places.items() if is_first else ():
            tensor = self.tensors[index]
            if not tensor.is_sharded:
                yield from _ranges(place, tensor.cut, 0, tensor.value.detach().reshape(-1), tensor.dtype)

    def placements(self) -> dict[str, str]:
        """How the distributed tensors are placed that are saved; for people."""
        tensors = [self.tensors[index] for index in self.places]
        return {tensor.name: placements_text(tensor.value) for tensor in tensors if is_distributed(tensor.value)}


def plan_model(state: ShardedState, *, exclude_frozen: bool = False) -> ModelPlan:
    """Collects the tensors of `state_dict()`, in its order.

    exclude_frozen: parameters that are not trained are not saved.

    Raises NotImplementedError for a DTensor that is not sharded.
    """
    master_dtypes = {id(p): group.master_dtype for group in state.core.flat_groups for _, p, _, _ in group.slots}
    names_of: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, value in named_tensors(state.model):
        names_of.setdefault(id(value), []).append(name)
        values[id(value)] = value
    tensors, index_of = [], {}
    for index, (key, names) in enumerate(names_of.items()):
        value = values[key]
        is_sharded = key in master_dtypes
        if not is_sharded:
            _refuse_unknown_part(names[0], value)
        dtype = master_dtypes.get(key, value.dtype)
        saves = state.parallel.is_first_of(value)
        tensors.append(ModelTensor(names[0], value, dtype, is_sharded, cut_of(value), saves))
        index_of.update(dict.fromkeys(names, index))
    kept = [i for i, tensor in enumerate(tensors) if not (exclude_frozen and _is_frozen(tensor.value))]
    kept_set = set(kept)
    layout = _plan_layout(
        "model",
        [tensors[i].name for i in kept],
        [tensors[i].value.shape for i in kept],
        [tensors[i].dtype for i in kept],
        {name: tensors[i].name for name, i in index_of.items() if i in kept_set and name != tensors[i].name},
    )
    return ModelPlan(tensors, index_of, layout, dict(zip(kept, layout.places, strict=True)))


def refuse_unknown_parts(state: ShardedState) -> None:
    """Raises NotImplementedError for a DTensor that is not sharded."""
    sharded = {id(p) for group in state.core.flat_groups for _, p, _, _ in group.slots}
    for name, value in named_tensors(state.model):
        if id(value) not in sharded:
            _refuse_unknown_part(name, value)


def _refuse_unknown_part(name: str, value: torch.Tensor) -> None:
    if is_distributed(value):
        raise NotImplementedError(
            f"'{name}' is a DTensor that fully_shard was not given (a buffer, or named in ignored_params), of which "
            "nobody knows who has which part; save the module that holds it apart, with torch.distributed.checkpoint"
        )


def refuse_parts(plan: ModelPlan, instead: str) -> None:
    """Raises NotImplementedError where tensors are distributed, for what needs them whole. instead: what to do then."""
    for name, text in plan.placements().items():
        raise NotImplementedError(f"'{name}' is a DTensor ({text}), of which each rank has a part; {instead}")


def _is_frozen(value: torch.Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


# By key, of one parameter's state: {"dtype": name} for a value per element, {"dtype": name, "shape": list} for a
# factor, {"number": JSON} for a number.
Signature = dict[str, Any]


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer's state over all ranks; the same on every rank."""

    kind: str
    groups: list[dict[str, Any]]
    model: ModelPlan
    entries: dict[tuple[str, str], int]  # (parameter name, key) -> index into layout.places
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    layout: _C.Layout
    numbers: dict[str, dict[str, Any]]

    def saved(self) -> SavedOptimizer:
        tensors: dict[str, dict[str, SavedTensor]] = {}
        places = self.layout.places  # a new list in each access
        for (name, key), index in self.entries.items():
            place = places[index]
            tensors.setdefault(name, {})[key] = _saved(self.layout, place, self.dtypes[index], self.shapes[index])
        return SavedOptimizer(self.kind, self.groups, tensors, self.numbers)

    def ranges(self, optimizer: ShardedOptimizer, first_file: int) -> Iterator[ByteRange]:
        """Yields what a rank of the first replica writes; the optimizer's files are numbered from `first_file` on."""
        places = self.layout.places
        for saved_name, key, cut, tensor, start in own_pieces(optimizer, self.model):
            index = self.entries[saved_name, key]
            for part in _ranges(places[index], cut, start, tensor, self.dtypes[index]):
                yield part._replace(file=part.file + first_file)


def own_pieces(optimizer: ShardedOptimizer, model: ModelPlan) -> Iterator[tuple[str, str, Cut, torch.Tensor, int]]:
    """Yields (parameter's name in the checkpoint, key, cut, flat values, their first element in the part).

    Over all ranks, of the tensors of its state; of each element one rank does.
    """
    for name, key, values, start, _ in optimizer.local_state():
        tensor = model.tensors[model.index_of[name]]
        if tensor.is_saved_here:
            yield tensor.name, key, tensor.cut, values, start
    for name, key, values, is_first in optimizer.local_factors():
        tensor = model.tensors[model.index_of[name]]
        if is_first and tensor.is_saved_here:
            yield tensor.name, key, whole(values.shape), values.reshape(-1), 0


def optimizer_kind(optimizer: ShardedOptimizer) -> str:
    kind = type(optimizer._wrapped)
    return f"{kind.__module__}.{kind.__qualname__}"


def kinds_of(optimizers: Mapping[str, ShardedOptimizer]) -> str:
    kinds = [f"{name}: {optimizer_kind(one)}" if name else optimizer_kind(one) for name, one in optimizers.items()]
    return ", ".join(kinds) or "None"


def group_names(optimizer: torch.optim.Optimizer, model: ModelPlan) -> list[list[str]]:
    """The parameters of each param group by the names they are saved under."""
    name_of = {id(tensor.value): tensor.name for tensor in model.tensors}
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def encode_groups(optimizer: torch.optim.Optimizer, model: ModelPlan) -> list[dict[str, Any]]:
    """Returns the param groups as JSON. Raises TypeError for an option that is no nested value of numbers and text."""
    groups = []
    for index, (group, names) in enumerate(zip(optimizer.param_groups, group_names(optimizer, model), strict=True)):
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        encoded = {k: encode(v, f"param_groups[{index}][{k!r}]", keep_scalar) for k, v in options.items()}
        groups.append({"params": names, **encoded})
    return groups


def local_signatures(optimizer: ShardedOptimizer, model: ModelPlan) -> dict[str, str]:
    """Says in few words which state this rank owns a part of: JSON of a Signature -> parameters, as "0-57,60"."""
    signatures: dict[int, Signature] = {}
    for name, key, dtype in optimizer.local_keys():
        signatures.setdefault(model.index_of[name], {})[key] = {"dtype": dtype_name(dtype)}
    for name, key, tensor, _ in optimizer.local_factors():
        if not model.tensors[model.index_of[name]].cut.is_whole:
            raise NotImplementedError(
                f"the optimizer's state {key!r} of '{name}' is of a part of that parameter, a DTensor, and belongs to "
                "no place of the whole; use an elementwise optimizer such as AdamW for it"
            )
        signature = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        signatures.setdefault(model.index_of[name], {})[key] = signature
    for name, key, value in optimizer.local_scalars():
        path = f"the optimizer's state {key!r} of '{name}'"
        signatures.setdefault(model.index_of[name], {})[key] = {"number": encode(value, path, keep_scalar)}
    parameters: dict[str, list[int]] = {}
    for index, signature in sorted(signatures.items()):
        parameters.setdefault(json.dumps(signature, sort_keys=True, allow_nan=False), []).append(index)
    return {signature: _to_ranges(indices) for signature, indices in parameters.items()}


def plan_optimizer(
    kind: str,
    groups: list[dict[str, Any]],
    model: ModelPlan,
    announced: list[dict[str, str]],
    *,
    stem: str = "optimizer",
    prefix: str = "",
) -> OptimizerPlan:
    """Lays the state out that the ranks announced together by `local_signatures`.

    stem: of the files' names. prefix: of the tensors' names in them.

    Raises RuntimeError where two ranks have different state of one parameter.
    """
    signatures: dict[int, Signature] = {}
    for rank, ranks_own in enumerate(announced):
        for text, indices in ranks_own.items():
            signature = json.loads(text)
            for index in _from_ranges(indices):
                if signatures.setdefault(index, signature) != signature:
                    raise RuntimeError(
                        f"rank {rank} has other optimizer state for '{model.tensors[index].name}' ({text}) than an "
                        f"earlier rank ({json.dumps(signatures[index])}); step the same parameters on every rank"
                    )
    entries: dict[tuple[str, str], int] = {}
    dtypes: list[torch.dtype] = []
    shapes: list[torch.Size] = []
    numbers: dict[str, dict[str, Any]] = {}
    for index, signature in sorted(signatures.items()):
        name = model.tensors[index].name
        for key, value in signature.items():
            if "dtype" in value:
                entries[name, key] = len(dtypes)
                dtypes.append(dtype_of(value["dtype"]))
                shapes.append(torch.Size(value.get("shape", model.tensors[index].value.shape)))
            else:
                numbers.setdefault(name, {})[key] = value["number"]
    layout = _plan_layout(
        stem,
        [f"{prefix}{name}/{key}" for name, key in entries],
        shapes,
        dtypes,
        {},
    )
    return OptimizerPlan(kind, groups, model, entries, dtypes, shapes, layout, numbers)


def _to_ranges(indices: list[int]) -> str:
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{first}-{last}" for first, last in ranges)


def _from_ranges(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, last = part.split("-")
        yield from range(int(first), int(last) + 1)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _plan_layout(
    stem: str, names: list[str], shapes: list[torch.Size], dtypes: list[torch.dtype], aliases: dict[str, str]
) -> _C.Layout:
    return _C.plan_layout(
        names=names,
        shapes=[list(shape) for shape in shapes],
        dtypes=dtypes,
        max_file_bytes=_MAX_FILE_BYTES,
        stem=stem,
        metadata={**aliases, "format": "pt"},
    )


def _saved(layout: _C.Layout, place: _C.TensorPlace, dtype: torch.dtype, shape: torch.Size) -> SavedTensor:
    return SavedTensor(layout.files[place.file].name, place.offset, dtype, tuple(shape))


def _ranges(place: _C.TensorPlace, cut: Cut, start: int, flat: torch.Tensor, dtype: torch.dtype) -> Iterator[ByteRange]:
    return byte_ranges(place.file, place.offset, cut, start, flat, dtype)
