"""Units of which each node has one copy: the bits of a copy per rank, in less memory, whatever happens meanwhile."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.fetch.test_prefetch import ALL, BLOCKS, WIDTH, Net, on_path, train, weights_of
from tests.sharding.ranks import close, equal, raises
from tests.signals import Rung, prepare_to_ring
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import RankPool, SeparateHosts, run_ranks
from zeropg.compression import BlockQuant, Plan

HOSTS = (0, 0, 1, 1, 0)  # nodes of three ranks and of two
PLACE = SeparateHosts(hosts=HOSTS)
PER_NODE = "gathered per node"
NO_POOL = 0


@pytest.fixture
def pool(rank_pool: Callable[..., RankPool]) -> RankPool:
    return rank_pool(len(HOSTS), "zeropg", PLACE)


def group_of(ranks: list[int], pool_bytes: int = -1) -> dist.ProcessGroup:
    return dist.new_group(ranks, pg_options=zeropg.BackendOptions(pool_bytes=pool_bytes))


def fetch_names() -> list[str]:
    torch.set_num_threads(1)
    names = []
    for ranks, pool_bytes in (([0, 1, 2, 3], -1), ([0, 1, 2, 3], NO_POOL), ([0, 1, 2], -1), ([1, 2], -1), ([0, 4], -1)):
        group = group_of(ranks, pool_bytes)
        if dist.get_rank() in ranks:
            names.append(str(zeropg.fully_shard(Net(), process_group=group)._zeropg.fetch_name))
    return names


def test_where_nodes_have_several_ranks(pool: RankPool) -> None:
    names = pool.run(fetch_names)
    assert names[0] == [PER_NODE, "gathered", PER_NODE, "shared"]
    assert names[1] == [PER_NODE, "gathered", PER_NODE, "gathered"]
    assert names[2] == [PER_NODE, "gathered", "gathered", "gathered"], "alone on its node in the last two"


def check_any_program() -> None:
    torch.set_num_threads(1)
    for ranks in ([0, 1, 2, 3, 4], [0, 2, 4]):
        results = []
        # A pool that is too small for two units at once: ranks have some units together, and others not.
        for pool_bytes, prefetch_numel in ((NO_POOL, 1), (-1, 150), (4096, 1)):
            group = group_of(ranks, pool_bytes)
            if dist.get_rank() not in ranks:
                continue
            model = zeropg.fully_shard(Net(), process_group=group, prefetch_numel=prefetch_numel)
            train(model, zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model))
            results.append(weights_of(model))
        assert all(equal(*pair) for result in results for pair in zip(result, results[0], strict=True))


def test_any_program(pool: RankPool) -> None:
    pool.run(check_any_program, timeout=180)


def losses_of(group: dist.ProcessGroup, **options: Any) -> list[float]:
    model = zeropg.fully_shard(make_model(seed=dist.get_rank()), process_group=group, **options)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    losses = []
    for batch in make_batches(3):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_other_dtypes_and_encoded_weights() -> None:
    torch.set_num_threads(1)
    groups = [group_of([0, 1, 2, 3, 4], pool_bytes) for pool_bytes in (NO_POOL, -1)]
    for dtype in (None, torch.bfloat16):
        for plan in (None, Plan(weights=BlockQuant(4), gradients=BlockQuant(4))):
            for reshard in (True, False):
                options = {"param_dtype": dtype, "compression": plan, "reshard_after_forward": reshard}
                apart, together = (losses_of(group, **options) for group in groups)
                assert apart == together, options


def test_other_dtypes_and_encoded_weights(pool: RankPool) -> None:
    pool.run(check_other_dtypes_and_encoded_weights, timeout=180)


@contextmanager
def looking_at_weights(model: nn.Module, wanted: nn.Module, seconds: float) -> Iterator[list[bool]]:
    """Each rank takes its time in each block, and looks at the weights before and after that."""
    drawn = random.Random(dist.get_rank())
    right: list[bool] = []

    def look(index: int) -> None:
        weight = model.blocks[index].linear.weight
        for _ in range(2):
            right.append(equal(weight.detach().clone(), wanted.blocks[index].linear.weight.detach()))
            time.sleep(drawn.random() * seconds)

    hooks = [
        block.register_forward_hook(lambda *_, index=index: look(index)) for index, block in enumerate(model.blocks)
    ]
    yield right
    for hook in hooks:
        hook.remove()


def check_slow_ranks() -> None:
    torch.set_num_threads(1)
    model, wanted = zeropg.fully_shard(Net()), Net()
    with looking_at_weights(model, wanted, 0.02) as right:
        for path in (ALL, ALL, (0, 1, 1, 3), ALL, ALL):
            on_path(*path)(model, torch.ones(2, WIDTH, dtype=torch.float64))
    assert len(right) == 2 * 5 * BLOCKS
    assert all(right)


def test_nobody_writes_to_what_a_slow_rank_reads(pool: RankPool) -> None:
    pool.run(check_slow_ranks)


def check_writes() -> None:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model, wanted = zeropg.fully_shard(Net()), Net()

    def write(module: nn.Module, inputs: Any) -> None:
        if rank == 0:
            with torch.no_grad():
                module.linear.weight.add_(1)

    hook = model.blocks[1].register_forward_pre_hook(write)
    with torch.no_grad(), looking_at_weights(model, wanted, 0.05) as right:
        model(torch.ones(2, WIDTH, dtype=torch.float64))
    hook.remove()
    assert right == [rank != 0 or index // 2 != 1 for index in range(2 * BLOCKS)]


def test_what_one_rank_writes_is_its_own(pool: RankPool) -> None:
    pool.run(check_writes)


def held_bytes() -> list[float]:
    torch.set_num_threads(1)
    held = []
    for pool_bytes in (-1, NO_POOL):
        group = group_of([0, 1, 2, 3], pool_bytes)
        if dist.get_rank() < 4:
            model = zeropg.fully_shard(Net(), process_group=group, prefetch_numel=0)
            for _ in range(3):
                on_path(*ALL)(model, torch.ones(2, WIDTH, dtype=torch.float64))
            held.append(model._zeropg.memory_report()["gathered"])
    return held


def test_ranks_hold_their_part_of_one_copy(pool: RankPool) -> None:
    for together, apart in pool.run(held_bytes)[:4]:
        assert 0.4 * apart <= together <= 0.6 * apart


def take_another_path() -> str:
    torch.set_num_threads(1)
    model = zeropg.fully_shard(Net(), process_group=dist.new_group())
    path = (0, 2, 1, 3) if dist.get_rank() == 1 else ALL
    try:
        model(torch.ones(2, WIDTH, dtype=torch.float64), path)
    except RuntimeError as error:
        return str(error)
    return "none"


def test_paths_that_differ_in_a_node_are_an_error_at_once() -> None:
    for error in run_ranks(len(HOSTS), take_another_path, place=PLACE, timeout=40):
        assert "the same units in the same order" in error and error.count(", item ") == 2, error


def interrupt(which: int) -> None:
    """A signal handler ends the waiting of one rank, whose node-mates and peers go on; then all do."""
    torch.set_num_threads(1)
    rank, x = dist.get_rank(), torch.ones(2, WIDTH, dtype=torch.float64)
    model, wanted = zeropg.fully_shard(Net()), Net()
    store = dist.PrefixStore(f"interrupt {which}", dist.distributed_c10d._get_default_store())
    on_path(*ALL)(model, x)
    late = (which + 2) % 4
    for _ in range(3):
        with torch.no_grad():
            if rank == which:
                prepare_to_ring()
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with raises(Rung):
                    model(x)
                store.add("interrupted", 1)
            elif rank == late:
                store.wait(["interrupted"])
            if rank != which:
                model(x, ())
            dist.barrier()
            store.delete_key("interrupted")
            dist.barrier()
            assert equal(model(x), wanted(x).detach())
    on_path(*ALL)(model, x)


@pytest.mark.parametrize("which", [0, 1])
def test_a_wait_that_a_signal_ends(pool: RankPool, which: int) -> None:
    pool.run(interrupt, which)


def fork_in_forward() -> None:
    """What a child drops its parent still holds."""
    torch.set_num_threads(1)
    models = [zeropg.fully_shard(Net())]

    def fork(*_: Any) -> None:
        child = os.fork()
        if child == 0:
            try:
                models.clear()
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    models[0].blocks[1].register_forward_pre_hook(fork)
    with looking_at_weights(models[0], Net(), 0.01) as right:
        for _ in range(3):
            on_path(*ALL)(models[0], torch.ones(2, WIDTH, dtype=torch.float64))
    assert all(right)


def test_a_child_lets_go_of_nothing() -> None:
    run_ranks(4, fork_in_forward, place=SeparateHosts(hosts=(0, 0, 1, 1)))


def die_in_forward(victim: int) -> str:
    torch.set_num_threads(1)
    model, x = zeropg.fully_shard(Net()), torch.ones(2, WIDTH, dtype=torch.float64)
    on_path(*ALL)(model, x)

    def die(*_: Any) -> None:
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[2].register_forward_hook(die)
    start = time.monotonic()
    try:
        for _ in range(3):
            on_path(*ALL)(model, x)
    except RuntimeError as error:
        assert time.monotonic() - start < 10
        return str(error)
    return "none"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named(victim: int) -> None:
    errors = run_ranks(
        4, die_in_forward, victim, place=SeparateHosts(hosts=(0, 0, 1, 1)), expect_death=[victim], timeout=40
    )
    for rank, error in enumerate(errors):
        assert rank == victim or f"rank {victim}" in error, error


def drop_models() -> None:
    """Each rank drops its models when it likes, also with units that are whole."""
    torch.set_num_threads(1)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for turn in range(2):
        first, second = zeropg.fully_shard(Net()), zeropg.fully_shard(Net())
        loss = first(x).sum() + second(x, (3, 2)).sum()
        if dist.get_rank() % 2 == turn % 2:
            del first, second, loss
            gc.collect()
        else:
            time.sleep(0.05)
            assert close(loss.detach(), Net()(x).sum().detach() + Net()(x, (3, 2)).sum().detach())


def test_models_that_are_dropped_while_units_are_whole(pool: RankPool) -> None:
    pool.run(drop_models)
