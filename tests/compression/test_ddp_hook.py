"""DDP with compressed gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from zeropg.compression import BlockQuant, Codec, State, ddp_hook


def make_ddp(codec: Codec | None, **options: Any) -> tuple[DDP, State | None]:
    model = make_model()
    ddp = DDP(model, bucket_cap_mb=0.05, **options)  # several buckets, rebuilt after the first step
    state = None
    if codec is not None:
        state = State(codec, model=model)
        ddp.register_comm_hook(state, ddp_hook)
    return ddp, state


def train(ddp: DDP, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(ddp, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    return losses


def expect_equal_on_all_ranks(module: nn.Module) -> None:
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    rank0 = mine.clone()
    dist.broadcast(rank0, 0)
    assert torch.equal(mine, rank0)


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [(BlockQuant(8), 0.02), (BlockQuant(4), 0.08)],
    ids=str,
)
@on_ranks(2)
def test_ddp_learns_as_without_compression(codec: Codec, tolerance: float) -> None:
    batches = make_batches()
    plain, _ = make_ddp(None)
    expected = train(plain, make_optimizer(plain.module), batches)
    ddp, state = make_ddp(codec)
    losses = train(ddp, make_optimizer(ddp.module), batches)
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses[-1] == pytest.approx(expected[-1], rel=tolerance), (losses, expected)
    assert losses[-1] < 0.7 * losses[0]
    expect_equal_on_all_ranks(ddp.module)
    assert state is not None and state.residuals is not None
    names = {name for name, *_ in state.residuals.segments()}
    assert names == {name for name, parameter in ddp.module.named_parameters() if state.encodes(parameter)}


@pytest.mark.parametrize("is_named", [True, False])
@on_ranks(2)
def test_saved_residuals_continue_to_the_bit(is_named: bool) -> None:
    """In a new DDP object, whose buckets begin anew: residuals belong to parameters."""
    batches = make_batches()
    ddp, state = make_ddp(BlockQuant(4))
    if not is_named:
        ddp = DDP(make_model(), bucket_cap_mb=0.05)
        state = State(BlockQuant(4))
        ddp.register_comm_hook(state, ddp_hook)
    assert state is not None
    optimizer = make_optimizer(ddp.module)
    train(ddp, optimizer, batches[:5])
    saved = {
        "model": copy.deepcopy(ddp.module.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "compression": state.state_dict(),
    }
    # The second life of a run has its first buckets again, so both continue with new ones.
    results = []
    for with_residuals in (True, True, False):
        again = DDP(make_model(), bucket_cap_mb=0.05)
        again.module.load_state_dict(saved["model"])
        state = State(BlockQuant(4), model=again.module if is_named else None)
        if with_residuals:
            state.load_state_dict(saved["compression"])
        again.register_comm_hook(state, ddp_hook)
        optimizer = make_optimizer(again.module)
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        train(again, optimizer, batches[5:10])
        results.append(torch.cat([parameter.detach().flatten() for parameter in again.module.parameters()]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


KEEPS_BUCKETS = {"find_unused_parameters": True}  # new ones have other owners


def step(ddp: DDP, batch: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The averaged gradients."""
    ddp.zero_grad()
    (factor * loss_of(ddp, batch.chunk(dist.get_world_size())[dist.get_rank()])).backward()
    return {name: parameter.grad.flatten() for name, parameter in ddp.module.named_parameters()}


def owed(ddp: DDP, state: State) -> dict[str, torch.Tensor]:
    """What all ranks together still owe the average, by parameter."""
    debts = {name: torch.zeros(parameter.numel()) for name, parameter in ddp.module.named_parameters()}
    saved = state.state_dict()
    for name, hop, start, values in saved["residuals"]:
        debts[name][start : start + len(values)] += values if hop == 1 else values / dist.get_world_size()
    for debt in debts.values():
        dist.all_reduce(debt)
    return debts


def save_debts(folder: Path) -> None:
    ddp, state = make_ddp(BlockQuant(4), **KEEPS_BUCKETS)
    assert state is not None
    for batch in make_batches(3):
        step(ddp, batch)
    torch.save(state.state_dict(), folder / f"rank{dist.get_rank()}")


def pay_debts(folder: Path) -> None:
    ddp, state = make_ddp(BlockQuant(4), **KEEPS_BUCKETS)
    assert state is not None
    files = [folder / f"rank{rank}" for rank in range(min(2, dist.get_world_size()))]
    if dist.get_rank() < len(files):
        state.load_state_dict(torch.load(files[dist.get_rank()]))
        state.load_state_dict(state.state_dict())  # also before the first step
    before = owed(ddp, state)
    for name, debt in before.items():
        expected = torch.zeros_like(debt)
        for file in files:
            for key, hop, start, values in torch.load(file)["residuals"]:
                if key == name:
                    expected[start : start + len(values)] += values if hop == 1 else values / 2
        torch.testing.assert_close(debt, expected, rtol=1e-5, atol=1e-8)
    encoded = {name for name, parameter in ddp.module.named_parameters() if state.encodes(parameter)}
    assert {name for name, debt in before.items() if debt.any()} == encoded
    plain, _ = make_ddp(None)
    batch = make_batches(4)[3]
    wanted, found = step(plain, batch), step(ddp, batch)
    for name, debt in owed(ddp, state).items():
        torch.testing.assert_close(found[name] + debt, wanted[name] + before[name], rtol=0, atol=1e-6)
    # Without new gradients all of it arrives: nothing stays with a rank that no longer encodes that range.
    largest = max(debt.abs().max() for debt in before.values())
    for _ in range(8):
        step(ddp, batch, factor=0.0)
    assert all(debt.abs().max() < 1e-3 * largest for debt in owed(ddp, state).values())
    losses = train(ddp, make_optimizer(ddp.module), make_batches())
    assert losses[-1] < 0.7 * losses[0]
    expect_equal_on_all_ranks(ddp.module)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_ranks_owe_arrives_at_any_world_size(rank_pool: Any, tmp_path: Path, world_size: int) -> None:
    rank_pool(2).run(save_debts, tmp_path)
    rank_pool(world_size).run(pay_debts, tmp_path)


@on_ranks(2)
def test_no_sync_compresses_once() -> None:
    batches = make_batches(2)
    ddp, state = make_ddp(BlockQuant(4))
    assert state is not None and state.residuals is not None
    with ddp.no_sync():
        loss_of(ddp, batches[0]).backward()
    assert state.residuals.bytes == 0
    loss_of(ddp, batches[1]).backward()
    assert state.residuals.bytes > 0


@on_ranks(2)
def test_gradient_scaler_sees_overflow_and_training_goes_on() -> None:
    batches = make_batches(3)
    ddp, state = make_ddp(BlockQuant(4))
    optimizer = make_optimizer(ddp.module)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step, batch in enumerate(batches):
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        loss = loss_of(ddp, batch)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_changed = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert is_changed == (step != 1)
    assert scaler.get_scale() == 2.0**9
    assert state is not None and state.residuals is not None
    assert all(values.isfinite().all() for *_, values in state.residuals.segments())


@on_ranks(2)
def test_bad_use_is_named() -> None:
    with raises(TypeError, "BlockQuant'", "expected a codec such as"):
        State(BlockQuant)  # type: ignore[arg-type]
    state = State(BlockQuant(4))
    with raises(ValueError, "'weight'", "not finite"):
        state.load_state_dict({"residuals": [("weight", 0, 0, torch.tensor([float("inf")]))]})


@on_ranks(2)
def test_16_bit_gradients_travel_encoded() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(64, 64).to(dtype))
        ddp.register_comm_hook(State(BlockQuant(8), model=ddp.module), ddp_hook)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        ddp(x).sum().backward()
        exact = x.sum(0, dtype=torch.float32)
        dist.all_reduce(exact, dist.ReduceOp.AVG)
        bound = 0.02 * float(exact.abs().max())
        torch.testing.assert_close(ddp.module.weight.grad[0].float(), exact, atol=bound, rtol=0)
