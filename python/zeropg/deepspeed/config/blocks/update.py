"""The blocks `optimizer` and `scheduler`: what a step does, with which learning rate."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from zeropg.deepspeed.config.blocks.section import Section


class Optimizer(Section):
    """`optimizer`; params are the keyword arguments of its class, as DeepSpeed names them."""

    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class Scheduler(Section):
    """`scheduler`; params are the keyword arguments of its class."""

    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
