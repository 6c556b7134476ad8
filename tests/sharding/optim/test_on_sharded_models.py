"""shard_optimizer on models that fully_shard has sharded, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.spawn import RankPool

pytestmark = pytest.mark.skipif(not hasattr(zeropg, "fully_shard"), reason="this build has no sharded module")

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "lion": lambda p: zeropg.optim.Lion(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
STEPS = 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 33)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(33, 33) for _ in range(3))
        self.last = torch.nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        out: torch.Tensor = self.last(x)
        return out


def batch(step: int, samples: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(samples, 12, generator=generator, dtype=torch.float64).to(dtype)
    return values[:, :7], values[:, 7:]


def train(
    model: torch.nn.Module, original: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, rows: slice, samples: int
) -> None:
    dtype = next(model.parameters()).dtype
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(original, 10)
    for step in range(STEPS):
        inputs, targets = batch(step, samples, dtype)
        (model(inputs[rows]) - targets[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def train_in_all_stages(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, list[list[Any]]]:
    """Returns the parameters after training, per stage and of a plain model, and what each stage would save."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Net().to(dtype)
    trained, saved = [], []
    for stage in range(4):
        model = zeropg.fully_shard(copy.deepcopy(plain), stage=stage)
        original = MAKERS[name](model.parameters())
        optimizer = zeropg.shard_optimizer(original, model)
        train(model, original, optimizer, slice(rank * 4, rank * 4 + 4), 4 * world_size)
        with zeropg.full_parameters(model):
            trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        saved.append([(s.name, s.key, s.start, s.stop) for s in optimizer.local_state()])
    optimizer = MAKERS[name](plain.parameters())
    train(plain, optimizer, optimizer, slice(None), 4 * world_size)
    return trained, torch.cat([p.detach().flatten() for p in plain.parameters()]), saved


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_trains_as_one_plain_process(
    name: str, world_size: int, rank_pool: Callable[..., RankPool]
) -> None:
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 2e-6)):
        results = rank_pool(world_size).run(train_in_all_stages, name, dtype)
        for trained, expected, _ in results:
            for values in trained:
                assert values.equal(results[0][0][0]), "stages or ranks differ"
                torch.testing.assert_close(values, expected, rtol=0, atol=bound * expected.abs().max().item())
        for stage in range(4):
            covered: dict[tuple[str, str], list[int]] = {}
            for _, _, saved in results:
                for parameter, key, start, stop in saved[stage]:
                    covered.setdefault((parameter, key), []).extend(range(start, stop))
            for (parameter, key), elements in covered.items():
                numel = dict(Net().named_parameters())[parameter].numel()
                assert sorted(elements) == list(range(numel)), f"stage {stage} saves {key} of {parameter} otherwise"
