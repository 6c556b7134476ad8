"""What a signal handler raises while a rank waits for the others reaches the program, and the model works on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.fuse import Fuse
from tests.sharding.ranks import close, equal, raises
from tests.signals import Rung, prepare_to_ring, ring_in
from tests.spawn import RankPool, SeparateHosts, run_ranks
from zeropg.backend import unwrapped_backend
from zeropg.rank_io.agreement import peers_needed

DOUBLE = torch.float64


def interrupt_rank_0(function: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> None:
    """Rank 0 calls `prepare` and waits in `function` until a handler raises; only then do the others call both."""
    store = dist.PrefixStore("interrupts", dist.distributed_c10d._get_default_store())
    if dist.get_rank() != 0:
        store.wait(["interrupted"])
    if prepare is not None:
        prepare()
    if dist.get_rank() != 0:
        function()
        return
    with raises(Rung):
        ring_in(0.5)
        function()
    store.set("interrupted", "")


def make_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 5, dtype=DOUBLE)


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def interrupt_full_gradients(stage: int) -> None:
    x = torch.ones(2, 5, dtype=DOUBLE)
    wanted = gradients_of(make_linear(), x)
    model = zeropg.fully_shard(make_linear(), stage=stage)
    model(x).square().sum().backward()

    def show() -> None:
        with zeropg.full_gradients(model):
            pass

    interrupt_rank_0(show)
    with raises(RuntimeError, "is sharded"):
        model.weight.grad.clone()
    model.zero_grad()
    for times in (1, 2):
        model(x).square().sum().backward()
        with zeropg.full_gradients(model):
            found = [parameter.grad.clone() for parameter in model.parameters()]
        assert all(close(a, times * b) for a, b in zip(found, wanted, strict=True)), times


@pytest.mark.parametrize("stage", [2, 3])
def test_full_gradients_that_were_not_shown_are_hidden(stage: int) -> None:
    run_ranks(2, interrupt_full_gradients, stage)


def interrupt_forward() -> None:
    x = torch.ones(2, 5, dtype=DOUBLE)
    model = zeropg.fully_shard(make_linear(), stage=3)
    assert model._zeropg.fetch_name == "gathered"
    with torch.no_grad():
        interrupt_rank_0(lambda: model(x))
        assert equal(model(x), make_linear()(x))
    (flat,) = model._zeropg.flat_groups
    assert model._zeropg.memory_report()["gathered"] == 8 * flat.total_numel, "what was interrupted does not count"
    model(x).square().sum().backward()
    with zeropg.full_gradients(model):
        assert close(model.weight.grad, gradients_of(make_linear(), x)[0])


def interrupt_what_needs_peers() -> None:
    group = dist.distributed_c10d._get_default_group()

    def meet() -> None:
        with peers_needed(group, "meet"):
            dist.barrier()

    interrupt_rank_0(meet)
    meet()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(dist.DistBackendError, "meet: the ranks cannot reach each other any more", "rank 1"):
        meet()


def test_a_step_that_all_ranks_take() -> None:
    with RankPool(2) as pool:
        pool.run(interrupt_what_needs_peers, expect_death=[1])


def test_a_gather() -> None:
    run_ranks(2, interrupt_forward, place=SeparateHosts(hosts=(0, 1)))


def make_pair() -> nn.Sequential:
    pair = nn.Sequential(make_linear(), make_linear())
    pair[0].requires_grad_(False)
    return pair


def interrupt_second_gather(units: list[Any], in_forward: bool) -> None:
    """Rank 1 takes part in the first gather with its own call, and in the second when rank 0 has been interrupted."""
    x = torch.ones(2, 5, dtype=DOUBLE)
    model = zeropg.fully_shard(make_pair(), stage=3, units=units)
    first, second = model._zeropg.flat_groups
    store = dist.PrefixStore("second", dist.distributed_c10d._get_default_store())

    def gather(flat: Any) -> None:
        unwrapped_backend(dist.group.WORLD, torch.device("cpu")).all_gather_item(
            torch.empty(flat.total_numel, dtype=DOUBLE),
            torch.zeros(flat.shard_numel, dtype=DOUBLE),
            model._zeropg.first_item + 1 + [first, second].index(flat),
        ).wait()

    def use() -> None:
        with torch.no_grad():
            if in_forward:
                model(x)
            else:
                with zeropg.full_parameters(model, writable=True):
                    raise AssertionError("the second gather cannot have ended")

    if dist.get_rank() == 0:
        prepare_to_ring()
        store.set("bell", str(os.getpid()))
        with raises(Rung):
            use()
        store.set("interrupted", "")
    else:
        if not in_forward:
            dist.all_gather([torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([1]))  # writable=
        gather(first)
        time.sleep(0.5)  # rank 0 goes on to the second
        os.kill(int(store.get("bell")), signal.SIGALRM)
        store.wait(["interrupted"])
        gather(second)
    for layer in model:
        with raises(RuntimeError, "is sharded"):
            layer.weight.clone()
    with torch.no_grad():
        assert equal(model(x), make_pair()(x))


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("units", [[], [nn.Linear]], ids=["of one unit", "of another unit"])
def test_a_second_gather(units: list[Any], in_forward: bool) -> None:
    run_ranks(2, interrupt_second_gather, units, in_forward, place=SeparateHosts(hosts=(0, 1)))


class Ringing:
    """A core at the end of whose unshard_all a signal is handled."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def unshard_all(self, writable: bool) -> None:
        self._core.unshard_all(writable)
        raise Rung


def interrupt_full_parameters() -> None:
    model = zeropg.fully_shard(make_linear(), stage=3)
    state = model._zeropg_state
    core = state.core
    for writable in (False, True):
        state.core = Ringing(core)
        with raises(Rung), zeropg.full_parameters(model, writable=writable):
            raise AssertionError("not reached")
        with raises(RuntimeError, "is sharded"):
            model.weight.clone()
        state.core = core
        with zeropg.full_parameters(model):
            state.core = Ringing(core)
            with raises(Rung), zeropg.full_parameters(model):
                raise AssertionError("not reached")
            state.core = core
            assert equal(model.weight.detach(), make_linear().weight.detach())
        with raises(RuntimeError, "is sharded"):
            model.weight.clone()


def test_the_end_of_making_parameters_whole() -> None:
    run_ranks(2, interrupt_full_parameters)


def interrupt_entering(stage: int, is_writing: bool) -> None:
    x = torch.ones(2, 5, dtype=DOUBLE)
    model = zeropg.fully_shard(make_linear(), stage=stage)

    def read() -> None:
        with zeropg.full_parameters(model):
            assert equal(model.weight.detach(), make_linear().weight.detach())

    def read_shape() -> None:
        with zeropg.full_parameters(model):
            assert model.weight.shape == (5, 5)

    def write() -> None:
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.weight.zero_()

    if is_writing:
        with raises(RuntimeError, "different values") if dist.get_rank() > 0 else contextlib.nullcontext():
            interrupt_rank_0(write)
        if dist.get_rank() == 0:
            with raises(RuntimeError, "different values"):
                read()
        read_shape()
    else:
        interrupt_rank_0(read)
        read()
        with torch.no_grad():
            assert equal(model(x), make_linear()(x))


@pytest.mark.parametrize("is_writing", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_entering_full_parameters(stage: int, is_writing: bool) -> None:
    run_ranks(2, interrupt_entering, stage, is_writing)


def interrupt_leaving() -> None:
    model = zeropg.fully_shard(make_linear(), stage=3)
    store = dist.PrefixStore("leaving", dist.distributed_c10d._get_default_store())

    def write() -> None:
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.weight.zero_()
            if dist.get_rank() == 0:
                ring_in(0.5)
            else:
                store.wait(["interrupted"])

    if dist.get_rank() == 0:
        with raises(Rung):
            write()
        store.set("interrupted", "")
    else:
        write()
    with raises(RuntimeError, "is sharded"):
        model.weight.clone()
    with zeropg.full_parameters(model, writable=True), torch.no_grad():
        model.weight.zero_()
    with zeropg.full_parameters(model):
        assert not model.weight.any()


def test_leaving_full_parameters() -> None:
    run_ranks(2, interrupt_leaving)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = make_linear(), make_linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Fuse.apply(self.first(x)))


def interrupt_recovery(stage: int) -> None:
    x = torch.ones(2, 5, dtype=DOUBLE)
    wanted = gradients_of(Fused(), x)
    model = zeropg.fully_shard(Fused(), stage=stage, units=[nn.Linear])

    def fail_in_backward() -> None:
        loss = model(x).square().sum()
        Fuse.blown = True
        with raises(ArithmeticError, "fuse"):
            loss.backward()  # the gradient of `last` is on the wire, and the others have not come
        Fuse.blown = False

    def clean_up() -> None:
        with torch.no_grad():
            model(x)

    interrupt_rank_0(clean_up, prepare=fail_in_backward)
    model(x).square().sum().backward()
    with zeropg.full_gradients(model):
        found = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_cleaning_up_a_backward_that_raised(stage: int) -> None:
    run_ranks(2, interrupt_recovery, stage)


def interrupt_step(stage: int) -> None:
    x = torch.ones(2, 5, dtype=DOUBLE)
    model = zeropg.fully_shard(make_linear(), stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    model(x).square().sum().backward()
    interrupt_rank_0(optimizer.step)
    plain = make_linear()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.1
    for _ in range(2):
        assert close(model(x), plain(x))
        for one, stepper in ((model, optimizer), (plain, plain_optimizer)):
            stepper.zero_grad()
            one(x).square().sum().backward()
            stepper.step()


def test_the_beginning_of_a_step() -> None:
    run_ranks(2, interrupt_step, 3)
