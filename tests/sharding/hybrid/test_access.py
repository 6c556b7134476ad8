"""What programs read and write between steps is the same on all replicas, or an error on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.hybrid.training import (
    TWO_HOSTS,
    assert_replicas_are_equal,
    make_mesh,
    over_gloo_in_soak,
    own_part,
    shard,
    step,
)
from tests.sharding.ranks import close, equal, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import Place


def write_everywhere(dtype: torch.dtype | None) -> None:
    rank, mesh = dist.get_rank(), make_mesh()
    for stage in (0, 1, 2, 3):
        model = shard(make_model(), mesh, stage=stage, param_dtype=dtype)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        step(model, optimizer, make_batches()[0])

        # The same on all ranks: it counts.
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.norm.weight.mul_(2)
        assert_replicas_are_equal(model)

        # On one rank of one replica: an error on every rank, and replicas stay equal.
        with raises(RuntimeError, "wrote different values to parameter 'norm.bias'"):  # noqa: SIM117
            with zeropg.full_parameters(model, writable=True), torch.no_grad():
                if rank == 3:
                    model.norm.bias.add_(1)
        assert_replicas_are_equal(model)

        # By one replica alone, alike on both of its ranks.
        with raises(RuntimeError, "wrote different values to parameter 'norm.bias'"):  # noqa: SIM117
            with zeropg.full_parameters(model, writable=True), torch.no_grad():
                if rank >= 2:
                    model.norm.bias.add_(1)
        assert_replicas_are_equal(model)

        if stage < 3:
            with torch.no_grad():
                model.norm.bias.sub_(1 if rank >= 2 else 0)
            with raises(RuntimeError, "wrote different values to parameter 'norm.bias'"):
                step(model, optimizer, make_batches()[1])
            optimizer.zero_grad()
            assert_replicas_are_equal(model)

        # Slices: each shard its own, its replicas the same.
        with zeropg.writable_shards(model) as shards:
            for _, tensor, *_ in shards:
                tensor.add_(0.25 * (rank % 2))
        assert_replicas_are_equal(model)
        with raises(RuntimeError, "writable_shards: the replicas of a slice set different values"):  # noqa: SIM117
            with zeropg.writable_shards(model) as shards:
                for _, tensor, *_ in shards:
                    tensor.add_(rank)
        assert_replicas_are_equal(model)
        step(model, optimizer, make_batches()[2])
        assert_replicas_are_equal(model)

        # Through a raw pointer to this rank's masters.
        for _, tensor, *_ in zeropg.local_shards(model):
            if rank == 1:
                tensor.numpy()[:] += 1
        with raises(RuntimeError, "the replicas of a slice wrote different values to their masters"):
            zeropg.full_state_dict(model)
        assert_replicas_are_equal(model)
        step(model, optimizer, make_batches()[3])
        assert_replicas_are_equal(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@over_gloo_in_soak
def test_a_write_on_one_replica_is_an_error_on_all_ranks(
    rank_pool, backend: str, place: Place, dtype: torch.dtype | None
) -> None:
    rank_pool(4, backend, place).run(write_everywhere, dtype)


def renormalize() -> None:
    """Embedding(max_norm=) renormalizes the rows that a rank looks up."""
    rank, mesh = dist.get_rank(), make_mesh()
    torch.manual_seed(0)
    plain = nn.Embedding(8, 4, max_norm=0.5).double()
    for stage in (0, 1, 2, 3):
        table = nn.Embedding(8, 4, max_norm=0.5).double()
        table.load_state_dict(plain.state_dict())
        model = shard(nn.Sequential(table, nn.Linear(4, 1).double()), mesh, stage=stage)
        model(torch.tensor([rank, rank + 4])).sum().backward()
        assert_replicas_are_equal(model)
        whole = zeropg.full_state_dict(model, rank0_only=False)["0.weight"]
        expected = nn.Embedding.from_pretrained(plain.weight.detach().clone(), max_norm=0.5)
        expected(torch.arange(8))
        assert equal(whole, expected.weight.detach()), stage


def look_at_gradients() -> None:
    mesh, batch = make_mesh(), make_batches()[0]
    plain = make_model(torch.float64)
    loss_of(plain, batch).backward()
    norms = []
    for stage in (0, 1, 2, 3):
        model = shard(make_model(torch.float64), mesh, stage=stage)
        loss_of(model, own_part(batch)).backward()
        with zeropg.full_gradients(model):
            for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert close(mine.grad, theirs.grad), (stage, name)
        norms.append(zeropg.clip_grad_norm_(model, 0.1))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert all(close(norm, expected) for norm in norms)
    every = [torch.zeros(4, dtype=torch.float64) for _ in range(4)]
    dist.all_gather(every, torch.stack(norms))
    assert all(equal(one, every[0]) for one in every)


def use_odd_parameters() -> None:
    """What ranks must agree upon: which parameters have a gradient, whether one overflowed, statistics, loads."""
    rank, mesh = dist.get_rank(), make_mesh()
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)}
        model = shard(nn.ModuleDict(parts).double() and _Branches(parts).double(), mesh, stage=stage)
        optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        before = zeropg.full_state_dict(model, rank0_only=False)
        # Only rank 2 uses b.
        model(torch.randn(4, 3, dtype=torch.float64) + rank, uses_b=rank == 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_replicas_are_equal(model)
        after = zeropg.full_state_dict(model, rank0_only=False)
        assert not equal(before["parts.b.weight"], after["parts.b.weight"]), stage

        # One rank overflows: nobody steps.
        scaler = zeropg.GradScaler("cpu", init_scale=2.0)
        loss = model(torch.randn(4, 3, dtype=torch.float64), uses_b=True).square().mean()
        scaler.scale(loss * (float("inf") if rank == 3 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 1.0
        unchanged = zeropg.full_state_dict(model, rank0_only=False)
        assert all(equal(unchanged[name], after[name]) for name, _ in model.named_parameters())

        # From rank 0's dictionary; and one rank with another dictionary is an error.
        zeropg.load_full_state_dict(model, before if rank == 0 else {}, broadcast_from_rank0=True)
        loaded = zeropg.full_state_dict(model, rank0_only=False)
        assert all(equal(loaded[name], before[name]) for name in before)
        assert zeropg.full_state_dict(model).keys() == (before.keys() if rank == 0 else set())
        other = {name: value + (rank == 3) if "a.weight" in name else value for name, value in before.items()}
        with raises(RuntimeError, "different values"):
            model.load_state_dict(other)
        assert_replicas_are_equal(model)


class _Branches(nn.Module):
    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: torch.Tensor, uses_b: bool) -> torch.Tensor:
        x = self.parts["norm"](self.parts["a"](x))
        return self.parts["b"](x) if uses_b else x


def average_weights() -> None:
    mesh = make_mesh()
    for stage in (0, 1, 2, 3):
        plain = make_model(torch.float64)
        model = shard(make_model(torch.float64), mesh, stage=stage)
        steppers = make_optimizer(plain), zeropg.shard_optimizer(make_optimizer(model), model)
        average = zeropg.ema(model, 0.5)
        expected = torch.optim.swa_utils.AveragedModel(
            plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for batch in make_batches()[:3]:
            loss_of(plain, batch).backward()
            loss_of(model, own_part(batch)).backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            average.update()
            expected.update_parameters(plain)
        with average.average_parameters():
            assert_replicas_are_equal(model)
            state = zeropg.full_state_dict(model, rank0_only=False)
        for name, value in expected.module.named_parameters():
            assert close(state[name], value.detach(), 1e-10), (stage, name)


@pytest.mark.parametrize("check", [renormalize, look_at_gradients, use_odd_parameters, average_weights])
def test_all_ranks_agree(rank_pool, check) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(check)


@pytest.mark.parametrize("check", [renormalize, use_odd_parameters])
def test_all_ranks_agree_over_gloo(rank_pool, check) -> None:
    rank_pool(4, "gloo").run(check)
