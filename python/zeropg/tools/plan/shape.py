"""The sizes that a plan is computed from: units, and in each the parameters that share a flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from zeropg.compression.plan import Plan
from zeropg.sharding.units import UnitChoice, plan_units

# As sharding/flat_layout.h: offsets in a flat buffer, and the slices of the ranks, are multiples of it.
ALIGNMENT_NUMEL = 32


@dataclass(frozen=True)
class Flat:
    """The parameters of one unit with one dtype that are all trainable or all frozen: one flat buffer.

    encodable: which parameters a plan of compression encodes; None: all of them.
    is_encoded: all of them travel encoded.
    """

    numels: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool = True
    encodable: tuple[bool, ...] | None = None
    is_encoded: bool = False

    def split(self) -> tuple[Flat, ...]:
        """The flat buffers that it becomes with compression: of what travels encoded, and of what does not."""
        parts: dict[bool, list[int]] = {}
        for numel, is_encoded in zip(self.numels, self.encodable or (True,) * len(self.numels), strict=True):
            parts.setdefault(is_encoded, []).append(numel)
        return tuple(
            replace(self, numels=tuple(numels), encodable=(is_encoded,) * len(numels), is_encoded=is_encoded)
            for is_encoded, numels in parts.items()
        )

    def total_numel(self, ranks: int) -> int:
        """Elements of the buffer, padding included."""
        end = sum(_round_up(numel, ALIGNMENT_NUMEL) for numel in self.numels)
        return _round_up(end, ranks * ALIGNMENT_NUMEL)

    def shard_numel(self, ranks: int) -> int:
        """Elements of one rank's slice."""
        return self.total_numel(ranks) // ranks


@dataclass(frozen=True)
class Unit:
    """What is made whole together."""

    name: str
    flats: tuple[Flat, ...]


@dataclass(frozen=True)
class ModelShape:
    """A model as a plan sees it. The last unit is the root: it stays open during a whole backward."""

    description: str
    units: tuple[Unit, ...]

    @property
    def parameters(self) -> int:
        return sum(sum(flat.numels) for unit in self.units for flat in unit.flats)

    def split(self) -> ModelShape:
        """The same with compression (Flat.split)."""
        return replace(
            self,
            units=tuple(
                replace(unit, flats=tuple(part for flat in unit.flats for part in flat.split())) for unit in self.units
            ),
        )

    @property
    def trainable_parameters(self) -> int:
        return sum(sum(flat.numels) for unit in self.units for flat in unit.flats if flat.is_trainable)


def shape_of(model: nn.Module, units: Iterable[UnitChoice] | None = None) -> ModelShape:
    """The shape of a model that is not sharded; parameters on `meta` will do."""
    plans = plan_units(model, units, None)
    return ModelShape(
        f"{type(model).__name__} in {_dtype_names(model)}",
        tuple(Unit(plan.name, _flats([parameter for _, parameter in plan.parameters])) for plan in plans),
    )


def shape_of_config(name: str, dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a Hugging Face model from its config alone; no weights are read or made.

    name: a folder with a config.json, or a model's name. Raises ValueError with the reason where that fails.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("--model needs the package transformers; give --params, or pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        architectures = getattr(config, "architectures", None) or []
        auto: Any = transformers.AutoModel
        kind: Any = next((getattr(transformers, a) for a in architectures if hasattr(transformers, a)), None)
        with torch.device("meta"):
            model = kind._from_config(config) if kind else auto.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {name}: {str(error).splitlines()[0]}") from None
    shape = shape_of(model if dtype is None else model.to(dtype))
    return ModelShape(f"{name}: {shape.description}", shape.units)


def shape_of_gpt(parameters: int, *, layers: int | None = None, vocabulary: int = 32_000) -> ModelShape:
    """A transformer with about `parameters` fp32 parameters, as its makers usually shape one.

    Width is 128 times the number of layers, near what GPT-3 (96 layers of 12288) and Llama 7B (32 of 4096) chose;
    a layer has 12 width^2 parameters in four matrices. Embedding and head are one matrix, in the root.
    """
    if parameters < 1:
        raise ValueError(f"a model of {parameters} parameters")
    if layers is None:
        layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
    # width from 12 * layers * width^2 + vocabulary * width = parameters
    width = (((vocabulary**2 + 48 * layers * parameters) ** 0.5) - vocabulary) / (24 * layers)
    root = min(parameters, max(1, round(vocabulary * width)))
    blocks, rest = divmod(parameters - root, layers)
    root += rest
    matrices = (blocks // 4, blocks // 12, blocks // 3, blocks - blocks // 4 - blocks // 12 - blocks // 3)
    units = [Unit(f"blocks.{index}", (Flat(matrices, torch.float32),)) for index in range(layers) if blocks]
    return ModelShape(
        f"a GPT of {layers} layers, about {max(1, round(width))} wide (assumed; --model knows)",
        (*units, Unit("", (Flat((root,), torch.float32),))),
    )


def _flats(parameters: Sequence[nn.Parameter]) -> tuple[Flat, ...]:
    groups: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    return tuple(
        Flat(
            tuple(prod(parameter.shape) for parameter in group),
            dtype,
            trainable,
            tuple(_is_encodable(parameter) for parameter in group),
        )
        for (dtype, trainable), group in groups.items()
    )


def _is_encodable(parameter: nn.Parameter) -> bool:
    """As a plan of compression decides without further arguments, also for parameters on `meta`."""
    is_float = parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return is_float and parameter.dim() > 1 and parameter.numel() >= Plan.min_elements


def _dtype_names(model: nn.Module) -> str:
    return " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})) or "nothing"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
