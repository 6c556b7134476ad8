"""DistributedDataParallel over zeropg gives gloo's losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.integration.gpt_losses import check_losses_are_gloos
from tests.spawn import RankPool


@pytest.fixture(scope="module", params=[2, 3])
def run(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(request.param).run


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.normal = nn.BatchNorm1d(64)  # buffers, which DDP broadcasts
        self.second = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 3)
        self.last = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor, uses_all: bool = False) -> torch.Tensor:
        x = self.second(torch.relu(self.normal(self.first(x))))
        return self.last(torch.relu(x)) + (0.01 * self.unused(x).mean() if uses_all else 0.0)


def losses(backend: str, hook: str = "", dtype: torch.dtype = torch.float32) -> list[float]:
    group = dist.new_group(backend=backend)
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    # PowerSGD's callbacks communicate, in no order with what DDP itself does meanwhile: one bucket, and no search.
    is_simple = hook == "powersgd"
    model = DDP(
        Network().to(dtype),
        process_group=group,
        find_unused_parameters=not is_simple,
        bucket_cap_mb=25.0 if is_simple else 0.01,
    )
    if hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(group, fp16_compress_hook)
    elif hook.startswith("built-in "):
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook.removeprefix("built-in ")))
    elif hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank)).to(dtype)
    result = []
    for step in range(10):
        loss = (model(x, uses_all=is_simple or step % 3 == 2) - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    with model.no_sync():
        model(torch.ones(8, 20).to(dtype), uses_all=True).sum().backward()
    del model
    dist.barrier(group)
    dist.destroy_process_group(group)
    return result


def check_losses(hook: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, gloos = losses("zeropg", hook, dtype), losses("gloo", hook, dtype)
    assert ours == pytest.approx(gloos, rel=tolerance), (ours, gloos)
    assert ours[-1] < 0.7 * ours[0], ours


@pytest.mark.parametrize(
    ("hook", "dtype", "tolerance"),
    [
        ("", torch.float64, 1e-12),
        ("", torch.float32, 1e-5),
        ("fp16", torch.float32, 1e-2),
        ("built-in ALLREDUCE", torch.float32, 1e-5),
        ("built-in FP16_COMPRESS", torch.float32, 1e-2),
        ("powersgd", torch.float32, 1e-3),
    ],
)
def test_ddp_has_gloos_losses(run: Callable[..., Any], hook: str, dtype: torch.dtype, tolerance: float) -> None:
    run(check_losses, hook, dtype, tolerance)


def with_ddp(model: nn.Module, backend: str) -> nn.Module:
    return DDP(model, process_group=dist.new_group(backend=backend))


def test_ddp_trains_the_gpt_with_gloos_losses(run: Callable[..., Any]) -> None:
    run(check_losses_are_gloos, with_ddp)
