"""What transformers renames, merges, splits or transposes as it loads a model: its own table, one part at a time."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropg.checkpoint.plan import ModelPlan
from zeropg.checkpoint.safetensors_folder import PIECE_BYTES, SafetensorsFolder, StoredTensor


@dataclass(frozen=True, eq=False)
class ConvertedTensor:
    """One that transformers makes of others in the files. Its values exist only while they are read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    recipe: _Recipe

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Conversions:
    """Names the tensors of a folder as the model names them. `tensors`: by that name.

    A model that is not transformers' keeps the names of the files, and so does what its table does not know. Raises
    ValueError where transformers cannot convert what the files hold. Nothing is read before `pieces`.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, folder: SafetensorsFolder) -> None:
        self._folder = folder
        self._current: tuple[_Recipe, range | None, dict[str, torch.Tensor]] | None = None
        self.tensors: dict[str, StoredTensor | ConvertedTensor] = {}
        table = _table_of(model)
        if table is None:
            self.tensors.update(folder.tensors)
            return
        recipes: dict[str, _Recipe] = {}
        whole = _WholeModel(model, plan)
        for name in sorted(folder.tensors, key=table.order):
            renamed, pattern = table.rename(name, plan.index_of)
            if pattern is None or renamed not in plan.index_of:
                self._add(renamed if renamed in plan.index_of else name, folder.tensors[name])
                continue
            recipe = recipes.setdefault(renamed, _Recipe(table.converters[pattern], renamed, whole))
            recipe.add(pattern, folder.tensors[name])
        for recipe in recipes.values():
            for name, made in recipe.makes().items():
                self._add(name, made)
        # As the files have them: of two values for a tied weight the last one counts.
        place_of = {name: place for place, name in enumerate(folder.tensors)}
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: place_of[_first_source(item[1])]))

    def pieces(
        self, tensor: StoredTensor | ConvertedTensor, start: int, stop: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values) of elements [start, stop) of the flat tensor; each is valid until the next.

        Raises as SafetensorsFolder.pieces does.
        """
        if isinstance(tensor, StoredTensor):
            yield from self._folder.pieces(tensor, start, stop)
        elif start < stop:
            rows = tensor.recipe.rows(tensor, start, stop)
            if self._current is None or self._current[:2] != (tensor.recipe, rows):
                self._current = None  # frees the last one's memory
                self._current = (tensor.recipe, rows, tensor.recipe.convert(self._read, rows))
            first = rows.start * (tensor.numel // tensor.shape[0]) if rows else 0
            flat = self._current[2][tensor.name].reshape(-1)
            step = PIECE_BYTES // tensor.dtype.itemsize
            for at in range(start, stop, step):
                yield at, flat[at - first : min(at + step, stop) - first]

    def _add(self, name: str, tensor: StoredTensor | ConvertedTensor) -> None:
        if (other := self.tensors.setdefault(name, tensor)) is not tensor:
            raise ValueError(f"'{other.name}' and '{tensor.name}' both are '{name}' of the model: which one counts?")

    def _read(self, tensor: StoredTensor) -> torch.Tensor:
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        for _ in self._folder.into_place(tensor, 0, values):
            pass
        return values


def _first_source(tensor: StoredTensor | ConvertedTensor) -> str:
    return tensor.name if isinstance(tensor, StoredTensor) else tensor.recipe.first_source


class _Recipe:
    """One converter and the tensors that it takes, which make one or more of the model's."""

    def __init__(self, converter: Any, target: str, model: _WholeModel) -> None:
        self._converter, self._target, self._model = converter, target, model
        self._sources: dict[str, list[StoredTensor]] = {}

    @property
    def first_source(self) -> str:
        return next(iter(self._sources.values()))[0].name

    def add(self, pattern: str, tensor: StoredTensor) -> None:
        self._sources.setdefault(pattern, []).append(tensor)

    def makes(self) -> dict[str, ConvertedTensor]:
        try:
            made = self.convert(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), None)
        except Exception as error:
            names = [tensor.name for tensors in self._sources.values() for tensor in tensors]
            raise ValueError(
                f"transformers cannot make '{self._target}' of '{names[0]}' and {len(names) - 1} more: {error}"
            ) from error
        return {name: ConvertedTensor(name, tuple(value.shape), value.dtype, self) for name, value in made.items()}

    def rows(self, tensor: ConvertedTensor, start: int, stop: int) -> range | None:
        """Those of dimension 0 that elements [start, stop) need; None: all, since they are not made one by one."""
        steps = [(type(step).__name__, getattr(step, "dim", 0)) for step in self._converter.operations]
        if steps[0] != ("MergeModulelist", 0) or any(name != "Concatenate" or dim < 1 for name, dim in steps[1:]):
            return None
        row = tensor.numel // tensor.shape[0]
        return range(start // row, -(-stop // row))

    def convert(self, read: Callable[[StoredTensor], torch.Tensor], rows: range | None) -> dict[str, torch.Tensor]:
        """Returns what is made, by name."""
        converter = deepcopy(self._converter)
        for pattern, tensors in self._sources.items():
            for tensor in tensors if rows is None else tensors[rows.start : rows.stop]:
                converter.add_tensor(self._target, tensor.name, pattern, read(tensor))
        made = converter.convert(self._target, model=self._model, config=self._model.config)
        made = made[0] if isinstance(made, tuple) else made  # 5.0 returns errors, too
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _WholeModel:
    """The model, whose parameters have the shapes that they have without sharding."""

    def __init__(self, model: nn.Module, plan: ModelPlan) -> None:
        self._model, self._plan = model, plan

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._plan.tensors[self._plan.index_of[name]].value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Table:
    """The renamings and converters that transformers has for a model. `converters`: by the patterns that they take."""

    def __init__(self, model: Any) -> None:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        steps = conversion_mapping.get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._rename = loading.rename_source_key
        self._renamings = [step for step in steps if isinstance(step, loading.WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, loading.WeightConverter)]
        self.converters = {pattern: step for step in self._converters for pattern in step.source_patterns}
        self.order = loading.dot_natural_key

    def rename(self, name: str, names_here: dict[str, Any]) -> tuple[str, str | None]:
        """Returns the name in the model, and the pattern of the converter that takes the tensor, if one does."""
        renamed, pattern = self._rename(name, self._renamings, self._converters)
        if renamed not in names_here:  # only then: a model may have both x and prefix.x
            renamed, pattern = self._rename(name, self._renamings, self._converters, self._prefix, names_here)
        return (name, None) if renamed not in names_here and name in names_here else (renamed, pattern)


def _table_of(model: nn.Module) -> _Table | None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    if importlib.util.find_spec("transformers.conversion_mapping") is None:  # before 5.0, which converts nothing
        return None
    return _Table(model)
