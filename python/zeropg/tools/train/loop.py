"""The training loop: what a user of zeropg writes, with a progress bar around it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import zeropg
from zeropg.tools.train.memory import MIB, resident_bytes
from zeropg.tools.train.text import IGNORED, TrainingBatches

Batch = tuple[Tensor, Tensor]

_REPORT_STEPS = 10  # between two updates of the bar's figures: each costs one small all-gather
_VALIDATIONS = 8  # times the validation loss is taken during a run
_CLIP_NORM = 1.0


@dataclass
class History:
    """What a run measured. Losses are in nats per byte, averaged over all ranks."""

    training: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss since the one before)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss on the whole validation part)
    seconds: float = 0.0  # inside training steps
    communication_seconds: float = 0.0  # of those, in zeropg's collectives and waits; the mean over ranks
    tokens: int = 0  # bytes read, by all ranks
    peak_process_bytes: int = 0  # proportional set size of the largest rank


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW as GPTs are trained: weight decay on matrices, none on biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then a cosine from 1 down to 0.05."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def train(
    model: nn.Module,
    batches: TrainingBatches,
    validation: list[Batch],
    *,
    steps: int,
    lr: float,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> tuple[History, torch.optim.Optimizer]:
    """Train the sharded `model` for `steps` steps; every rank calls it with its own parts of the text.

    checkpoint: a directory, written every `checkpoint_every` steps and after the last one, and read by `resume`.
    """
    whole_optimizer = make_optimizer(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(whole_optimizer, lambda step: learning_rate_factor(step, steps))
    # The sharded optimizer shares the param_groups of the one it replaces, so the schedule above still steers it.
    optimizer = zeropg.shard_optimizer(whole_optimizer, model)

    device = next(model.parameters()).device
    history = History()
    first = 0
    if resume and checkpoint is not None:
        state, _ = zeropg.load_checkpoint(checkpoint, model, optimizer)
        first = state["step"]
        if first >= steps:
            raise ValueError(f"'{checkpoint}' is from the end of step {first} already; expected more --steps than that")
        schedule.load_state_dict(state["schedule"])
        history.training, history.validation = state["training"], state["validation"]
    meter = _Meter(model, history)
    validate_every = math.ceil(steps / _VALIDATIONS)
    for step in _progress(range(first, steps), meter):
        inputs, targets = (part.to(device) for part in batches.at(step))
        loss = loss_per_byte(model(inputs), targets)
        loss.backward()
        zeropg.clip_grad_norm_(model, _CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        done = step + 1
        meter.count(loss, targets.numel())
        if done % _REPORT_STEPS == 0 or done == steps:
            meter.report(done)
        if done % validate_every == 0 or done == steps:
            history.validation.append((done, evaluate(model, validation)))
            meter.resume()
        if checkpoint is not None and checkpoint_every and (done % checkpoint_every == 0 or done == steps):
            state = {"step": done, "schedule": schedule.state_dict()}
            state |= {"training": history.training, "validation": history.validation}
            zeropg.save_checkpoint(checkpoint, model, optimizer, extra=state)
    return history, optimizer


def loss_per_byte(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, in float32 whatever the dtype of `logits` (`[batch, length, 256]`)."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch]) -> float:
    """Mean loss over the batches of all ranks, in nats per byte; every rank calls it and gets the same number."""
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)  # nats, bytes
    model.eval()
    for inputs, targets in batches:
        total[0] += loss_per_byte(model(inputs.to(device)), targets.to(device), reduction="sum")
        total[1] += (targets != IGNORED).sum().item()
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def communication_seconds(model: nn.Module) -> float:
    """Seconds that this process has spent so far inside zeropg's collectives and waits for `model`."""
    core: Any = model._zeropg
    return float(core.communication_seconds())


class _Meter:
    """Collects the figures of the last few steps into `history`, and shows them on rank 0's progress bar.

    Its clock runs from `resume` to `report`, so that validation is not counted.
    """

    def __init__(self, model: nn.Module, history: History) -> None:
        self.bar: tqdm[int] | None = None
        self._model = model
        self._history = history
        self._device = next(model.parameters()).device
        self.resume()

    def resume(self) -> None:
        """Begin a new group of steps."""
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._steps = 0
        self._tokens = 0
        self._communication_start = communication_seconds(self._model)
        self._start = time.perf_counter()

    def count(self, loss: Tensor, tokens: int) -> None:
        """Add one step of this rank, without waiting for the device."""
        self._loss += loss.detach()
        self._steps += 1
        self._tokens += tokens * dist.get_world_size()

    def report(self, step: int) -> None:
        """End a group of steps: bring the figures of all ranks together; every rank calls it."""
        loss = float(self._loss) / self._steps  # waits for the device, so it stands before the clock is read
        seconds = time.perf_counter() - self._start
        communication = communication_seconds(self._model) - self._communication_start
        mine = torch.tensor([loss, communication, resident_bytes()], dtype=torch.float64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        loss, communication, _ = torch.stack(everyone).mean(dim=0).tolist()
        process_bytes = int(torch.stack(everyone)[:, 2].max())

        history = self._history
        history.training.append((step, loss))
        history.seconds += seconds
        history.communication_seconds += communication
        history.tokens += self._tokens
        history.peak_process_bytes = max(history.peak_process_bytes, process_bytes)
        if self.bar is not None:
            validation = f", validation {history.validation[-1][1]:.3f}" if history.validation else ""
            self.bar.set_postfix_str(
                f"loss {loss:.3f}{validation}, {self._tokens / seconds:,.0f} tokens/s, "
                f"communication {communication / seconds:.0%}, {process_bytes / MIB:.0f} MiB/rank"
            )
        self.resume()


def _progress(steps: Iterable[int], meter: _Meter) -> Iterator[int]:
    """`steps`, with a bar on rank 0."""
    if dist.get_rank() != 0:
        yield from steps
        return
    with tqdm(steps, unit="step", dynamic_ncols=True) as bar:
        meter.bar = bar
        yield from bar
