"""What a checkpoint keeps beside model and optimizer: the scaler, each rank's random state, the sampler's position."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

import zeropg
from tests.sharding.ranks import STAGES, on_ranks

ROWS, BATCH = 42, 3  # 7 batches in each of 2 ranks' epochs
BEFORE, AFTER = 5, 6  # steps: the second part begins inside an epoch and goes on into the next
OVERFLOWS = {1: 0, 8: 1}  # by step: the rank whose loss is infinite


class Step(NamedTuple):
    loss: float
    scale: float
    rows: list[int]


class Training:
    """A model with dropout, in fp16 with a scaler, on the rows that a sampler chooses."""

    def __init__(self, stage: int, seed: int) -> None:
        torch.manual_seed(seed)
        layers = (nn.Linear(7, 33), nn.Dropout(0.4), nn.Tanh(), nn.Linear(33, 1))
        self.model = zeropg.fully_shard(nn.Sequential(*layers), stage=stage, param_dtype=torch.float16)
        self.optimizer = zeropg.shard_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2), self.model)
        # Grows after every third good step: the count since the last change is state too.
        self.scaler = zeropg.GradScaler(init_scale=2.0**8 * (1 + seed), growth_interval=3)
        self.data = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(3))
        self.sampler: DistributedSampler[Any] = DistributedSampler(self.data, seed=5)  # type: ignore[arg-type]
        self.epoch = self.position = 0  # the latter in rows of this rank
        torch.manual_seed(100 * seed + dist.get_rank())

    def train(self, first: int, last: int) -> list[Step]:
        return [self._step(dist.get_rank() == OVERFLOWS.get(step)) for step in range(first, last)]

    def _step(self, is_too_large: bool) -> Step:
        self.sampler.set_epoch(self.epoch)
        rows = list(islice(self.sampler, self.position, self.position + BATCH))
        self.position += BATCH
        if self.position == len(self.sampler):
            self.epoch, self.position = self.epoch + 1, 0
        x = self.data[rows]
        loss = (self.model(x).float() - x.sum(1, keepdim=True)).square().mean()
        self.scaler.scale(loss * (torch.inf if is_too_large else 1.0)).backward()
        self.scaler.unscale_(self.optimizer)
        zeropg.clip_grad_norm_(self.model, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return Step(loss.item(), self.scaler.get_scale(), rows)

    def save(self, directory: Path) -> None:
        extra = {"scaler": self.scaler.state_dict(), "epoch": self.epoch}
        rank_extra = {"rng": torch.get_rng_state(), "position": self.position}
        zeropg.save_checkpoint(directory, self.model, self.optimizer, extra=extra, rank_extra=rank_extra)

    def load(self, directory: Path, left_out: str) -> None:
        extra, rank_extra = zeropg.load_checkpoint(directory, self.model, self.optimizer)
        if left_out != "scaler":
            self.scaler.load_state_dict(extra["scaler"])
        if left_out != "rng":
            torch.set_rng_state(rank_extra["rng"])
        if left_out != "sampler":
            self.epoch, self.position = extra["epoch"], rank_extra["position"]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_scaler_random_state_and_sampler_go_on_to_the_bit(tmp_path: Path, stage: int) -> None:
    """And whatever is left out is missed, so that each of them is seen to matter."""
    first = Training(stage, seed=0)
    before = first.train(0, BEFORE)
    first.save(tmp_path)
    expected = first.train(BEFORE, BEFORE + AFTER)
    assert len({step.scale for step in before}) == len({step.scale for step in expected}) == 2, "the scale never moved"
    assert {row for step in expected[:2] for row in step.rows}.isdisjoint(row for step in before for row in step.rows)
    for left_out in ("nothing", "scaler", "rng", "sampler"):
        again = Training(stage, seed=7)
        again.load(tmp_path, left_out)
        assert (again.train(BEFORE, BEFORE + AFTER) == expected) == (left_out == "nothing"), left_out
