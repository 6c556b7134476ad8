"""`flops_profiler`: the operations of one micro-batch, and how fast they ran, by module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeropg.deepspeed.config.blocks.observation import FlopsProfiler as Settings
from zeropg.deepspeed.observation.flops_table import Measured, Part, lines
from zeropg.deepspeed.observation.observer import Clock, Facts, Observer, Phase

# torch 2.11 runs what it cannot count without being told to.
_LENIENT: dict[str, Any] = (
    {"skip_unsupported": True} if "skip_unsupported" in inspect.signature(FlopCounterMode.__init__).parameters else {}
)


class FlopsProfiler(Observer):
    """Counts in one update, times in the next, since counting is slow, and prints a table on the rank that it runs on.

    It measures the first micro-batch of each. Operations are those that torch.utils.flop_counter knows: matrix
    products, convolutions and attention. It does not see a backward that the program runs itself.
    """

    def __init__(self, model: nn.Module, settings: Settings, clock: Clock, world_size: int) -> None:
        self._model = model
        self._settings = settings
        self._clock = clock
        self._world_size = world_size
        self._updates = 0
        self._counters: dict[Phase, FlopCounterMode] = {}
        self._seconds: dict[Phase, float] = {}
        self._parts: list[Part] = []
        self._inside = ExitStack()
        self._began: float | None = None
        self._update_began: float | None = None

    def begin(self, phase: Phase, inputs: Sequence[Any]) -> None:
        if self._updates == max(0, self._settings.profile_step - 1) and phase not in ("step", *self._counters):
            self._counters[phase] = self._inside.enter_context(FlopCounterMode(display=False, **_LENIENT))
        if self._updates != self._settings.profile_step or (phase != "step" and phase in self._seconds):
            return
        if phase == "forward":
            self._parts = parts_of(self._model)
            self._inside.enter_context(_timed(self._model, self._parts, self._clock))
        self._began = self._clock.now()
        self._update_began = self._update_began or self._began

    def end(self, phase: Phase) -> None:
        if self._began is not None:
            self._seconds[phase] = self._clock.now() - self._began
            self._began = None
        self._inside.close()

    def updated(self, facts: Facts) -> None:
        if self._updates == self._settings.profile_step and self._update_began is not None and self._parts:
            self._print(facts, self._clock.now() - self._update_began)
        self._updates += 1

    def _print(self, facts: Facts, update_seconds: float) -> None:
        counted = {phase: counter.get_flop_counts() for phase, counter in self._counters.items()}
        root = type(self._model).__name__
        for part in self._parts:
            part.flops = sum(counted.get("forward", {}).get(f"{root}.{part.name}".rstrip("."), {}).values())
        totals = {phase: sum(by_module.get("Global", {}).values()) for phase, by_module in counted.items()}
        measured = Measured(
            facts.step, self._world_size, facts.micro_batch, facts.samples, totals, self._seconds, update_seconds
        )
        settings = self._settings
        depth, top = settings.module_depth, settings.top_modules
        text = "\n".join(lines(measured, self._parts, depth, top, settings.detailed))
        if settings.output_file is None:
            print(text, file=sys.stderr, flush=True)
            return
        path = Path(settings.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def parts_of(model: nn.Module) -> list[Part]:
    """All modules in named_modules() order, the whole model first; parameters that modules share count in each."""
    return [
        Part(
            name, type(module).__name__, name.count(".") + 1 if name else 0, sum(p.numel() for p in module.parameters())
        )
        for name, module in model.named_modules()
    ]


@contextmanager
def _timed(model: nn.Module, parts: Sequence[Part], clock: Clock) -> Iterator[None]:
    """Meanwhile adds up in each part the seconds of its forwards."""
    handles = []
    for part, module in zip(parts, model.modules(), strict=True):
        began: list[float] = []

        def before(*_: Any, began: list[float] = began) -> None:
            began.append(clock.now())

        def after(*_: Any, began: list[float] = began, part: Part = part) -> None:
            part.seconds += clock.now() - began.pop()

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
