"""What error feedback owes is paid, whatever changes between the call that lost it and the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zeropg
from tests.compression.test_all_reduce import group_on_hosts
from tests.sharding.ranks import on_ranks, raises
from zeropg.compression import Bf16, BlockQuant, State, TopK, all_reduce, ddp_hook

NUMEL = 5_000


def of_rank(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def total(state: State, codec: Any, calls: int, op: Any = dist.ReduceOp.AVG) -> torch.Tensor:
    """What calls of zeros still bring."""
    return sum((all_reduce(torch.zeros(NUMEL), codec, state=state, op=op, name="w") for _ in range(calls)), start=0)


def average_of(seed: int) -> torch.Tensor:
    exact = of_rank(seed)
    dist.all_reduce(exact, dist.ReduceOp.AVG)
    return exact


@pytest.mark.parametrize("hosts", ["0,1,2,3 0,0,1,1", "0,0,1,1 0,1,2,3", "0,0,0,0 0,1,0,1", "0,1,0,1 0,0,0,0"])
@on_ranks(4)
def test_on_other_hosts(hosts: str) -> None:
    """As many ranks as before, and others of them encode."""
    for codec in (TopK(0.2), BlockQuant(4)):
        before, after = (group_on_hosts(each) for each in hosts.split())
        state = State(codec, process_group=before)
        got = all_reduce(of_rank(1), codec, state=state, op=dist.ReduceOp.AVG, name="w")
        again = State(codec, process_group=after)
        again.load_state_dict(state.state_dict())
        got = got + total(again, codec, 40)
        torch.testing.assert_close(got, average_of(1), atol=1e-4, rtol=0)


class OutOfOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (3, 0, 4, 1, 2):
            x = self.layers[index](x)
        return x


@pytest.mark.parametrize("codec", [BlockQuant(4), TopK(0.3)])
@on_ranks(4)
def test_of_buckets_that_ddp_rebuilds_after_its_first_step(codec: Any) -> None:
    torch.manual_seed(0)
    group = group_on_hosts("0,0,1,1")
    model = OutOfOrder()
    ddp = DDP(model, process_group=group, bucket_cap_mb=0.02)
    state = State(codec, process_group=group, model=model)
    ddp.register_comm_hook(state, ddp_hook)
    sums: dict[str, torch.Tensor] = {}
    for step in range(40):
        ddp.zero_grad()
        (ddp(of_rank(2, 4 * 48).view(4, 48)).square().sum() * (step == 0)).backward()
        for name, parameter in model.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.clone()
    exact = OutOfOrder()
    exact.load_state_dict(model.state_dict())
    exact(of_rank(2, 4 * 48).view(4, 48)).square().sum().backward()
    for name, parameter in exact.named_parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        error = (sums[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, (name, error)


@on_ranks(2)
def test_under_a_codec_without_error_feedback() -> None:
    group = group_on_hosts("0,1")
    for codec in (BlockQuant(8, error_feedback=False), Bf16(error_feedback=False)):
        state = State(BlockQuant(4), process_group=group)
        got = all_reduce(of_rank(3), BlockQuant(4), state=state, op=dist.ReduceOp.AVG, name="w")
        again = State(codec, process_group=group)
        again.load_state_dict(state.state_dict())
        got = got + total(again, codec, 1)
        torch.testing.assert_close(got, average_of(3), atol=5e-3, rtol=0)  # as far as that codec goes
        assert not again.state_dict()["residuals"]


@on_ranks(2)
def test_by_a_codec_that_gets_error_feedback_later() -> None:
    state = State(BlockQuant(4, error_feedback=False), process_group=group_on_hosts("0,1"))
    state.use(BlockQuant(4))
    got = all_reduce(of_rank(4), BlockQuant(4), state=state, op=dist.ReduceOp.AVG, name="w")
    assert state.state_dict()["residuals"]
    torch.testing.assert_close(got + total(state, BlockQuant(4), 30), average_of(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", ["avg", "sum"])
@on_ranks(2)
def test_where_averages_follow_sums(first: str) -> None:
    codec = BlockQuant(4)
    state = State(codec, process_group=group_on_hosts("0,1"))
    kinds = [dist.ReduceOp.AVG, dist.ReduceOp.SUM]
    before, after = kinds if first == "avg" else kinds[::-1]
    exact = average_of(5) * (1 if first == "avg" else 2)
    lost = exact - all_reduce(of_rank(5), codec, state=state, op=before, name="w")
    still = total(state, codec, 30, after)  # in units of the new operation
    torch.testing.assert_close(still * (0.5 if first == "avg" else 2), lost, atol=1e-4, rtol=0)


@on_ranks(2)
def test_what_cannot_be_loaded_leaves_the_state_as_it_was() -> None:
    state = State(BlockQuant(4), process_group=group_on_hosts("0,1"))
    all_reduce(of_rank(6), BlockQuant(4), state=state, name="w")
    saved = state.state_dict()
    name, hop, start, values = saved["residuals"][-1]
    spoiled = [*saved["residuals"][:-1], (name, hop, start, torch.full_like(values, float("nan")))]
    for wrong in (
        {},
        None,
        [1],
        {"residuals": spoiled},
        {"residuals": [("w", 0, 0)]},
        {"residuals": [("w", 9, 0, values)]},
        {"residuals": [("w", 0, 0, [1.0])]},
        {**saved, "world_size": 0},
    ):
        with raises(ValueError, "[zeropg] State.load_state_dict", "expected what state_dict() gave"):
            state.load_state_dict(wrong)  # type: ignore[arg-type]
    for (*key, mine), (*other, theirs) in zip(state.state_dict()["residuals"], saved["residuals"], strict=True):
        assert key == other and torch.equal(mine, theirs)
    for factor in (float("nan"), 0.0, -1.0):
        with raises(ValueError, "expected a finite number above 0"):
            state.residuals.scale(factor)


@on_ranks(2)
def test_all_reduce_takes_what_auto_has_chosen() -> None:
    for hosts in ("0,0", "0,1"):
        state = State("auto", process_group=group_on_hosts(hosts))
        for numel in (3, NUMEL):
            mine = of_rank(7, numel)
            exact = mine.clone()
            dist.all_reduce(exact)
            all_reduce(mine, state.codec, state=state, name=f"w{numel}")
            torch.testing.assert_close(mine, exact, atol=1.0, rtol=0)


def debts_of_a_model(folder: str, step: str, stage: int, hosts: str) -> torch.Tensor:
    """How far the weights are from one exact step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    zeropg.fully_shard(model, stage=stage, compression=BlockQuant(4), process_group=group_on_hosts(hosts))
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    if step == "load":
        zeropg.load_checkpoint(folder, model, optimizer)
    for _ in range(1 if step == "save" else 30):
        factor = 1.0 if step == "save" else 0.0
        (model(of_rank(8, 2 * 64).view(2, 64)).square().sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    if step == "save":
        zeropg.save_checkpoint(folder, model, optimizer)
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, bias=False)
    plain(of_rank(8, 2 * 64).view(2, 64)).square().sum().backward()
    assert plain.weight.grad is not None
    dist.all_reduce(plain.weight.grad, dist.ReduceOp.AVG)
    wanted = plain.weight.detach() - plain.weight.grad
    return zeropg.full_state_dict(model, rank0_only=False)["weight"] - wanted


@pytest.mark.parametrize("stage", [0, 2])
def test_of_a_sharded_model_on_other_hosts(rank_pool: Any, tmp_path: Any, stage: int) -> None:
    folder = str(tmp_path / "checkpoint")
    lost = rank_pool(4).run(debts_of_a_model, folder, "save", stage, "0,1,2,3")[0]
    left = rank_pool(4).run(debts_of_a_model, folder, "load", stage, "0,0,1,1")[0]
    assert left.norm() < 1e-3 * lost.norm()
