"""The groups that a sharded model makes beside the one that it is given."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.sharding.ranks import close, on_ranks, raises
from tests.small_gpt import make_model
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
