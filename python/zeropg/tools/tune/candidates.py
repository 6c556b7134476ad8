"""The configurations that could be tried, and what a plan says of each before it runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeropg.deepspeed.config import Config
from zeropg.deepspeed.config.translate import param_dtype
from zeropg.deepspeed.observation.trial import Sizes
from zeropg.tools.plan.formulas import OPTIMIZER_SLOTS, Settings, memory, traffic
from zeropg.tools.plan.shape import Flat, ModelShape, Unit

_LEAST_FACTOR = 2  # from a micro-batch to the next larger one that is tried


@dataclass(frozen=True, order=True)
class Candidate:
    """offload: where the optimizer's state lies: "" where the configuration says, else a directory on a disk."""

    stage: int
    micro_batch: int
    offload: str = ""

    def __str__(self) -> str:
        return f"stage {self.stage}, micro-batch {self.micro_batch}" + (", optimizer on disk" if self.offload else "")


def micro_batches(train_batch: int, ranks: int) -> list[int]:
    """Those that make `train_batch` with whole accumulation steps, each at least twice the one before; ascending."""
    each = train_batch // ranks
    chosen: list[int] = []
    for size in range(1, each + 1):
        if each % size == 0 and (not chosen or size >= _LEAST_FACTOR * chosen[-1]):
            chosen.append(size)
    if chosen[-1] != each:
        chosen.append(each)
    return chosen


def config_of(base: dict[str, Any], candidate: Candidate, train_batch: int, ranks: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration of a candidate: `base`, but for what is tuned. The batch of a step stays."""
    config = copy.deepcopy(base)
    zero = dict(config.get("zero_optimization") or {})
    zero["stage"] = candidate.stage
    if candidate.stage < 3:
        zero.pop("offload_param", None)  # DeepSpeed allows it in stage 3 alone
    if candidate.offload:
        given = zero.get("offload_optimizer") or {}
        zero["offload_optimizer"] = {**given, "device": "nvme", "nvme_path": candidate.offload}
    config["zero_optimization"] = zero
    config["train_batch_size"] = train_batch
    config["train_micro_batch_size_per_gpu"] = candidate.micro_batch
    config["gradient_accumulation_steps"] = train_batch // (candidate.micro_batch * ranks)
    return config


def shape_of(sizes: Sizes) -> ModelShape:
    """The model as a plan sees it."""
    units = [Unit(str(number), _flats(parameters)) for number, parameters in enumerate(sizes.units)]
    return ModelShape("the script's model", tuple(units))


def plan_of(config: Config, candidate: Candidate, sizes: Sizes) -> Settings:
    """What `zeropg plan` computes memory and traffic from. An optimizer that it does not know counts as AdamW.

    config: the candidate's.
    """
    name = (config.optimizer.type or "adamw").lower()
    tier = config.zero_optimization.offload_optimizer.device
    return Settings(
        stage=candidate.stage,
        ranks=sizes.world_size,
        nodes=max(1, sizes.world_size // sizes.local_world_size),
        param_dtype=param_dtype(config),
        optimizer=name if name in OPTIMIZER_SLOTS else "adamw",
        device=sizes.device,
        offload_optimizer=None if tier == "none" else tier,
    )


def needed_bytes(shape: ModelShape, plan: Settings) -> int:
    """Of a node's memory, or of a GPU's, without activations."""
    each = sum(holding.bytes for holding in memory(shape, plan) if holding.tier == "device")
    return each if plan.device == "cuda" else each * plan.local_ranks


def sent_bytes(shape: ModelShape, plan: Settings, accumulation: int) -> float:
    """By one rank in one update: from stage 2 on gradients, in stage 3 also parameters, for each micro-batch."""
    rows = traffic(shape, plan)
    once = [row for row in rows if plan.stage < 2 or "after the step" in row.what]
    total = sum(row.inside_bytes + row.between_bytes for row in rows)
    paid_once = sum(row.inside_bytes + row.between_bytes for row in once)
    return paid_once + (total - paid_once) * accumulation


def _flats(parameters: Sequence[tuple[list[int], str, bool]]) -> tuple[Flat, ...]:
    groups: dict[tuple[str, bool], list[int]] = {}
    for shape, dtype, is_trained in parameters:
        numel = 1
        for length in shape:
            numel *= length
        groups.setdefault((dtype, is_trained), []).append(numel)
    return tuple(
        Flat(tuple(numels), getattr(torch, dtype.removeprefix("torch.")), is_trained)
        for (dtype, is_trained), numels in groups.items()
    )
