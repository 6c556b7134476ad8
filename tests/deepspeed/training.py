"""A small GPT, its batches, and its training under an engine and in one plain process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer

BATCH = 16
STEPS = 5
STAGES = (0, 1, 2, 3)
CLIP = 0.5


def batches() -> torch.Tensor:
    """[STEPS, BATCH, tokens + 1]."""
    rows = make_batches().flatten(0, 1)
    return rows[: STEPS * BATCH].view(STEPS, BATCH, -1)


def configuration(stage: int, gas: int = 1, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
    }
    return config | more


def make_engine(stage: int, gas: int = 1, **more: Any) -> Any:
    """The engine over the small GPT; rank 0's weights count."""
    from zeropg import deepspeed

    model = make_model(seed=0 if dist.get_rank() == 0 else 7)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model), config=configuration(stage, gas, **more)
    )
    return engine


def own_parts(batch: torch.Tensor, gas: int) -> tuple[torch.Tensor, ...]:
    """This rank's micro-batches of one batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(gas)


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(engine: Any, data: torch.Tensor, by_hand: bool = False) -> list[float]:
    """Losses of the joined batches. by_hand: the program runs `loss.backward()` itself."""
    losses = []
    for batch in data:
        total = torch.zeros((), dtype=torch.float64)
        parts = own_parts(batch, engine.gradient_accumulation_steps())
        for part in parts:
            loss = loss_of(engine, part)
            if by_hand:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            total += loss.detach().double() / len(parts)
        losses.append(mean_over_ranks(total))
    return losses


def train_plain(data: torch.Tensor) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one process on the joined batches."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@contextmanager
def shared_folder() -> Iterator[str]:
    """A new folder, the same on every rank; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="zeropg-engine-") as own:
        found: list[str] = [own]
        dist.broadcast_object_list(found)
        yield found[0]
        dist.barrier()
