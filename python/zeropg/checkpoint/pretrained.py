"""Weights of Hugging Face into a sharded model: each rank reads its own part."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zeropg.checkpoint.load_masters import Advance, load_masters, set_values
from zeropg.checkpoint.plan import ModelPlan, plan_model
from zeropg.checkpoint.safetensors_folder import SafetensorsFolder, StoredTensor
from zeropg.checkpoint.transformers_conversions import Conversions, ConvertedTensor
from zeropg.rank_io.agreement import check_same, together
from zeropg.rank_io.directory_path import directory_path
from zeropg.sharding.state import ShardedState, unchecked_state_of

_Source = StoredTensor | ConvertedTensor
_LISTED = 5  # names in an error; the rest is counted
_SAMPLED = 64  # elements of each tensor, which ranks compare
_OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))  # of BERT's time
# What older versions of transformers saved with models that have a buffer of that name, and no file needs.
_OLD_BUFFERS = (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$"))


class LoadedNames(NamedTuple):
    """As torch's load_state_dict returns them."""

    missing_keys: list[str]  # of the model, not in the files: they keep their values
    unexpected_keys: list[str]  # in the files, not of the model


def load_pretrained(model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> LoadedNames:
    """Sets a sharded model from Hugging Face safetensors, as save_pretrained writes them. All ranks must call.

    Each rank reads the elements that it owns, some MiB at a time, straight into the masters where these are on the CPU
    and have the files' dtype; nobody holds the model whole. Names are found as from_pretrained finds them: tied weights
    under any of their names, with or without the model's base_model_prefix, and LayerNorm's of BERT's time. Its
    table of conversions applies, too (in a mixture it stacks the experts): each rank converts the tensors of which it
    owns a part, of stacked experts its own ones. Floating dtypes are cast to the masters'.

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
        directory: with model.safetensors, or several files and model.safetensors.index.json; or one such file. Seen by
            every rank, with the same content.
        strict: raise where a name is missing or unexpected. False: what is missing keeps its value, and of two
            values for a tied weight the last one in the file counts.

    Returns:
        The names that were missing and unexpected, but for those of which the model says that they may be.

    Raises:
        FileNotFoundError: no safetensors there; the message says what is there instead.
        ValueError: a file is damaged, names, shapes or kinds of dtype differ, or (strict) the names of one tied weight
            have different values; the message lists them.
        OSError: a file cannot be read. Every rank raises the same error, and unless it says otherwise, the model is as
        it was.
    """
    state = unchecked_state_of(model, "load_pretrained")
    group = state.parallel.everybody
    loading: _Loading | None = None

    def open_folder() -> dict[str, str]:
        nonlocal loading
        state.check_modules("load_pretrained")
        state.check_may_write("load_pretrained")
        state.check_has_own_weights("load_pretrained")
        loading = _Loading(directory_path(directory), state, strict)
        return loading.announcement()

    try:
        check_same(group, "load_pretrained", together(group, "load_pretrained", open_folder))
        assert loading is not None  # otherwise the line above has raised
        opened: _Loading = loading
        load_masters(state, "load_pretrained", opened.own_bytes(), opened.read, _raise_half_loaded)
        return opened.names
    finally:
        if loading is not None:
            loading.close()


class _Loading:
    """Opens the files and compares them with the model; reads nothing yet. Nothing here communicates."""

    def __init__(self, directory: Path, state: ShardedState, strict: bool) -> None:
        self._state = state
        self._plan = plan_model(state)
        self._folder = SafetensorsFolder(directory)
        try:
            self._sources = Conversions(state.model, self._plan, self._folder)
            self._found, self.names = match_names(state.model, self._plan, self._sources.tensors)
            problems = _problems(self._plan, self._found, self.names if strict else LoadedNames([], []))
            problems += self._untied() if strict else []
            if problems:
                if any(name.endswith("packed_weight") for name in self.names.missing_keys):
                    problems.append("call zeropg.quantize_frozen after a plain model has loaded its weights")
                hint = "" if any("shape" in each for each in problems) else "; strict=False loads what fits"
                raise ValueError(f"the weights in '{directory}' do not fit the model; {'; '.join(problems)}{hint}")
        except BaseException:
            self.close()
            raise

    def _untied(self) -> list[str]:
        """What the files give several values for, and the model has once. Each rank compares its share."""
        group = self._state.parallel.everybody
        problems = []
        for name, stored in self._sources.tensors.items():
            index = self._plan.index_of.get(name)
            kept = stored if index is None else self._found[index]
            if kept is stored:
                continue
            begin, end = (stored.numel * part // group.size() for part in (group.rank(), group.rank() + 1))
            pieces = (self._sources.pieces(each, begin, end) for each in (stored, kept))
            if (stored.shape, stored.dtype) != (kept.shape, kept.dtype) or any(
                not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
                for (_, ours), (_, theirs) in zip(*pieces, strict=True)
            ):
                problems.append(f"tied in the model, but with other values in the files: {kept.name} and {name}")
        return problems

    def announcement(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        stored = sorted(self._folder.tensors.values(), key=lambda tensor: tensor.name)
        described = [(t.name, t.path.name, t.shape, str(t.dtype), self._sample(t)) for t in stored]
        return {"what the files hold (digest)": hashlib.sha256(repr(described).encode()).hexdigest()[:16]}

    def _sample(self, stored: StoredTensor) -> bytes:
        """Some values: an old copy on the disk of one node has the names and shapes of the new one."""
        start = stored.numel // 2
        pieces = self._folder.pieces(stored, start, min(start + _SAMPLED, stored.numel))
        return b"".join(values.contiguous().view(torch.uint8).numpy().tobytes() for _, values in pieces)

    def own_bytes(self) -> int:
        """About how much this rank will read."""
        core = self._state.core
        total = sum(source.numel * source.dtype.itemsize for source in self._found.values())
        return total // (core.shards if core.stage > 0 else 1)

    def read(self, advance: Advance) -> None:
        """Sets masters, parameters and buffers; between the core's begin_step and end_load."""
        set_values(self._state, self._plan, self._pieces, advance, self._into_place)

    def _pieces(self, index: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        source = self._found.get(index)
        if source is None:
            return iter(())
        return self._plan.tensors[index].cut.read(functools.partial(self._sources.pieces, source), start, stop)

    def _into_place(self, index: int, start: int, room: torch.Tensor) -> Iterator[int] | None:
        source = self._found.get(index)
        if not isinstance(source, StoredTensor) or source.dtype != room.dtype:
            return None
        first = self._plan.tensors[index].cut.neighbours(start, start + room.numel())
        if not room.is_floating_point() or not room.is_contiguous() or first is None:
            return None
        return self._folder.into_place(source, first, room)

    def close(self) -> None:
        self._folder.close()


def match_names(
    model: nn.Module, plan: ModelPlan, stored: Mapping[str, _Source]
) -> tuple[dict[int, _Source], LoadedNames]:
    """Returns what each of the plan's tensors, by index, is loaded from, and the names that have no counterpart."""
    found = {plan.index_of[name]: tensor for name, tensor in stored.items() if name in plan.index_of}
    unexpected = []
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    for name, tensor in stored.items():
        if name in plan.index_of:
            continue
        index = next((plan.index_of[each] for each in _names_here(name, prefix) if each in plan.index_of), None)
        if index is None or found.setdefault(index, tensor) is not tensor:
            unexpected.append(name)
    missing = [tensor.name for index, tensor in enumerate(plan.tensors) if index not in found]
    buffers = [name for name, _ in model.named_buffers()]
    old = [pattern for end, pattern in _OLD_BUFFERS if any(name.endswith(end) for name in buffers)]
    return found, LoadedNames(
        _not_matching(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)),
        _not_matching(unexpected, [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *old]),
    )


def _names_here(name: str, prefix: str) -> Iterator[str]:
    for old, new in (("", ""), *_OLD_NAMES):
        if name.endswith(old):
            here = name.removesuffix(old) + new
            yield here
            if prefix:
                yield f"{prefix}.{here}"
                yield here.removeprefix(f"{prefix}.")


def _not_matching(names: list[str], patterns: Any) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _problems(plan: ModelPlan, found: Mapping[int, _Source], names: LoadedNames) -> list[str]:
    misshapen = []
    for index, source in found.items():
        tensor = plan.tensors[index]
        is_other_kind = source.dtype.is_floating_point != tensor.dtype.is_floating_point
        if is_other_kind or source.shape != tuple(tensor.value.shape):
            here = f"{tensor.dtype} {list(tensor.value.shape)}"
            misshapen.append(f"{tensor.name} ({source.dtype} {list(source.shape)}, here {here})")
    return [
        f"{what}: {', '.join(which[:_LISTED])}" + (f" and {len(which) - _LISTED} more" if len(which) > _LISTED else "")
        for what, which in (
            ("not in the files", names.missing_keys),
            ("not in the model", names.unexpected_keys),
            ("of another shape or kind", misshapen),
        )
        if which
    ]


def _raise_half_loaded(_: Advance, failure: Exception | None) -> None:
    if failure is not None:
        text = f"{failure}; the model holds old and new values now: load weights before you use it"
        raise (ValueError if isinstance(failure, ValueError) else OSError)(text) from failure
