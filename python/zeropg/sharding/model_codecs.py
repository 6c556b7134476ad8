"""The codecs of a sharded model's gradients: one, or what `compression="auto"` chooses for each size."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.compression.auto import Auto
from zeropg.compression.codec import Codec
from zeropg.compression.coding import Coding
from zeropg.compression.plan import Plan
from zeropg.compression.state import backend_of

_STEPS = 25  # from one look at the link to the next


class ModelCodecs:
    """What the core encodes gradients by, and what that has saved and cost.

    coding: weights that travel encoded count too; its residuals are the core's.
    """

    def __init__(self, plan: Plan, auto: Auto | None, group: dist.ProcessGroup) -> None:
        self._plan, self._auto = plan, auto
        residuals = _C.ResidualStore()  # also without error feedback: what was lost under another codec is paid
        backend = backend_of(group, "fully_shard")
        self.coding = Coding(backend=backend, residuals=residuals, describe=self._describe)

    def rows(self) -> list[tuple[int, _C.Compressor | None, bool]]:
        """As the core takes them: (values of the least reduction, compressor, has_error_feedback)."""
        if self._auto is not None:
            chosen = self._auto.choice.rows
        else:
            chosen = () if self._plan.gradients is None else ((0, self._plan.gradients),)
        return [(least, *_as_core(codec)) for least, codec in chosen]

    def next_step(self) -> bool:
        """With "auto": counts a step; True where rows() may be others now. Collective at times."""
        return self._auto is not None and self._auto.next_call()

    def describe_gradients(self) -> str | None:
        """For people; None where gradients travel as they are whatever happens."""
        if self._auto is not None:
            return f"{self._auto.choice.codec or 'they are'} (auto)"
        return None if self._plan.gradients is None else str(self._plan.gradients)

    def _describe(self) -> str:
        return str(self._plan) if self._auto is None else f"gradients as {self.describe_gradients()}"


def make_codecs(
    plan: Plan | None, is_auto: bool, group: dist.ProcessGroup, reductions: _C.RankGroups
) -> ModelCodecs | None:
    """Of a model of `group` whose gradients are reduced over `reductions`. With "auto" measures, collective then."""
    auto = None
    if is_auto:
        groups = [reductions.everybody, reductions.shards, reductions.replicas]
        watched = {id(each): each for each in map(_cpu_backend, filter(None, groups))}
        auto = Auto(backend_of(group, "fully_shard"), list(watched.values()), calls=_STEPS)
    return None if plan is None else ModelCodecs(plan, auto, group)


def _cpu_backend(group: dist.ProcessGroup) -> object:
    return group._get_backend(torch.device("cpu"))


def _as_core(codec: Codec | None) -> tuple[_C.Compressor | None, bool]:
    return (None, False) if codec is None else (codec.make_compressor(), codec.error_feedback)
