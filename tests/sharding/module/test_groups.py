"""The groups that a sharded model makes beside the one that it is given."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.backend.deadlines import new_group_with
from tests.sharding.module.test_same_losses import relative_difference, train_sharded
from tests.sharding.ranks import close, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer, train_plain
from tests.spawn import SeparateHosts, run_ranks

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=47)


def check_second_group(backend: str) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = None
    if "zeropg" in backend:
        options = zeropg.BackendOptions(network="tcp", bank_bytes=8192, algorithms={"all_reduce": "all_reduce_staged"})
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, pg_options=options)
    model = zeropg.fully_shard(make_model(), stage=3)
    groups = list(dist.distributed_c10d._world.pg_map)
    assert len(groups) == 2
    for group in groups:
        made = group._get_backend(CPU).options
        assert made._timeout == TIMEOUT
        if options is not None:
            assert (made.network, made.bank_bytes, made.algorithms) == ("tcp", 8192, options.algorithms)
    del model
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["zeropg", "cpu:zeropg,cuda:zeropg", "gloo"])
def test_gradients_have_the_timeout_and_the_options_of_the_group(backend: str) -> None:
    """With torch's default of half an hour the ranks would wait for a host that is gone."""
    run_ranks(2, check_second_group, backend, backend=None, place=SeparateHosts(hosts=(0, 1)))


@on_ranks(2)
def test_a_timeout_that_is_set_later_counts_for_shared_parameters() -> None:
    group = dist.new_group()
    model = zeropg.fully_shard(torch.nn.Linear(3, 3), stage=3, process_group=group)
    assert model._zeropg.fetch_name == "shared"
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backend = group._get_backend(CPU)
    x = torch.ones(1, 3)
    before = model(x).detach()
    store = dist.PrefixStore("later", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        backend.set_timeout(timedelta(seconds=1))
        with raises(RuntimeError, "all ranks to finish reading parameters: rank 1 late after 1000 ms"):
            optimizer.step()
        backend.set_timeout(TIMEOUT)
        store.set("late", "")
    else:
        store.wait(["late"])
        optimizer.step()
    assert close(model(x), before)


def check_training_in_other_order() -> None:
    group = dist.new_group([1, 0], sort_ranks=False)
    assert group.rank() == 1 - dist.get_rank()
    plain = make_model(torch.float64)
    model = zeropg.fully_shard(make_model(torch.float64), stage=3, process_group=group)
    stepper = make_optimizer(plain)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    for batch in make_batches()[:3]:
        loss_of(plain, batch).backward()
        loss_of(model, batch.chunk(2)[dist.get_rank()]).backward()
        for one in (stepper, optimizer):
            one.step()
            one.zero_grad()
    state = zeropg.full_state_dict(model, rank0_only=False)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts ranks")
@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
def test_ranks_of_a_group_may_stand_in_any_order(backend: str) -> None:
    """A second group in torch's order would give each rank another one's gradients."""
    run_ranks(2, check_training_in_other_order, backend=backend, place=SeparateHosts(hosts=(0, 1)))


def shard_after_a_group_of_one_rank() -> Any:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    return train_sharded(3, torch.float64)


def test_ranks_may_have_made_different_groups_before() -> None:
    """torch names groups after how many a rank has made."""
    plain = train_plain(torch.float64)
    for run in run_ranks(2, shard_after_a_group_of_one_rank, place=SeparateHosts(hosts=(0, 1))):
        assert relative_difference(run, plain) < 1e-12


def check_a_group_of_all_ranks_afterwards() -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        models = [zeropg.fully_shard(make_model(), stage=3, process_group=pair) for _ in range(2)]
        assert len(dist.distributed_c10d._world.pg_map) == 4
        models.clear()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group())
    assert ones == 3


def test_ranks_outside_need_not_know_of_the_second_group() -> None:
    run_ranks(3, check_a_group_of_all_ranks_afterwards, place=SeparateHosts(hosts=(0, 1, 2)))


def shard_on_two_of_three() -> float:
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        for _ in range(2):
            model = zeropg.fully_shard(torch.nn.Linear(3, 3), stage=3, process_group=pair)
            model(torch.ones(2, 3)).sum().backward()
    everybody = dist.new_group([0, 1, 2])
    dist.barrier(everybody)
    model = zeropg.fully_shard(torch.nn.Linear(3, 3), stage=3)
    model(torch.ones(2, 3)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1, 2]))
    return total.item()


@pytest.mark.parametrize("backend", ["zeropg", "gloo"])
def test_a_model_on_some_ranks_leaves_the_names_of_groups_alone(backend: str) -> None:
    assert run_ranks(3, shard_on_two_of_three, backend=backend, timeout=60) == [3, 3, 3]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_function_that_not_all_ranks_call_is_named(stage: int) -> None:
    model = zeropg.fully_shard(nn.Linear(4, 4), stage=stage, process_group=new_group_with(1.0))
    if dist.get_rank() == 0:
        with raises(dist.DistBackendError, "ema: the ranks", "has not called it, as all must", "waiting for rank 1"):
            zeropg.ema(model)
    dist.barrier()
