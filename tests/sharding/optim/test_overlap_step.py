"""`shard_optimizer(overlap_step=True)`: the same bits as without, no stale weights, and an error for a read that comes
too early.

A parameter is hidden until something of zeropg has waited for it, whenever its values arrive; so these tests need no
slow network.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropg
from tests.sharding.hybrid.training import make_mesh
from tests.sharding.ranks import BACKENDS, STAGES, equal, on_ranks, raises
from tests.signals import Rung, ring_in
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import RankPool, SeparateHosts, run_ranks
from zeropg.compression import BlockQuant, Plan

STEPS = 10
ON_ITS_WAY = "is on its way"
# What is trained, beside the stage: options of fully_shard, micro-batches per step, and the GradScaler's scale.
VARIANTS: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "fp32": ({}, 1, None),
    "bf16, accumulated": ({"param_dtype": torch.bfloat16}, 2, None),
    "scaled": ({}, 1, 1024.0),
}

Result = tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]


def train(stage: int, overlaps: bool | None, accumulate: int = 1, scale: float | None = None, **options: Any) -> Result:
    """Losses of this rank, final parameters, and this rank's optimizer state."""
    model = zeropg.fully_shard(make_model(), stage=stage, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model, overlap_step=overlaps)
    scaler = zeropg.GradScaler(init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    for batch in make_batches(STEPS):
        parts = batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(accumulate)
        for index, part in enumerate(parts):
            is_last = index + 1 == len(parts)
            with contextlib.nullcontext() if is_last else zeropg.no_sync(model):
                loss = loss_of(model, part)
                scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        zeropg.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = [value.clone() for entries in optimizer.state.values() for value in entries.values()]
    return losses, zeropg.full_state_dict(model, rank0_only=False), state


def assert_same_bits(found: Result, wanted: Result) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(equal(found[1][name], wanted[1][name]) for name in wanted[1])
    assert all(map(equal, found[2], wanted[2]))


def train_both_ways(stages: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    for options, accumulate, scale in VARIANTS.values():
        for stage in stages:
            wanted = train(stage, None, accumulate, scale, **options)
            assert_same_bits(train(stage, True, accumulate, scale, **options), wanted)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (1, "zeropg"),
        (4, "zeropg"),
        (2, "gloo"),
        *[pytest.param(*kind, marks=pytest.mark.soak) for kind in ((2, "zeropg"), (1, "gloo"), (4, "gloo"))],
    ],
)
def test_every_stage_has_the_same_bits_as_without(
    rank_pool: Callable[..., RankPool], backend: str, world_size: int
) -> None:
    rank_pool(world_size, backend).run(train_both_ways, STAGES if world_size == 2 else (1, 2), timeout=180)


def train_between_nodes() -> None:
    torch.set_num_threads(1)
    plans = {"as they are": None, "encoded": Plan(gradients=BlockQuant(8), weights=BlockQuant(8))}
    for plan in plans.values():
        for stage in (1, 2):
            assert_same_bits(train(stage, True, compression=plan), train(stage, False, compression=plan))
    # The one difference: with an overlap all of them are on the wire at once.
    model, optimizer = make_small(overlaps=True, compression=plans["encoded"], width=64)
    step_once(model, optimizer)
    numel = sum(group.total_numel for group in model._zeropg.flat_groups if group.sends_differences)
    assert 4 * numel < model._zeropg.memory_report()["gathered"] < 8 * numel


def test_weights_between_nodes_encoded_or_not(rank_pool: Callable[..., RankPool]) -> None:
    rank_pool(2, "zeropg", SeparateHosts(hosts=(0, 1))).run(train_between_nodes, timeout=120)


def train_on_a_mesh() -> None:
    torch.set_num_threads(1)
    for stage in (1, 2):
        assert_same_bits(train(stage, True, mesh=make_mesh()), train(stage, False, mesh=make_mesh()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas(rank_pool: Callable[..., RankPool], backend: str) -> None:
    rank_pool(4, backend).run(train_on_a_mesh, timeout=120)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


class Net(nn.Module):
    """Blocks that are units; the root has the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.runs: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.runs(block, x)
        return self.norm(x)


WIDTH = 5


def make_small(
    *, overlaps: bool, stage: int = 1, width: int = WIDTH, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zeropg.fully_shard(Net(width), stage=stage, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return model, zeropg.shard_optimizer(optimizer, model, overlap_step=overlaps)


def inputs(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, model.first.in_features, generator=generator)


def step_once(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(inputs(model)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def is_hidden(parameter: torch.Tensor) -> bool:
    try:
        parameter.detach().clone()
    except RuntimeError as error:
        assert ON_ITS_WAY in str(error), error
        return True
    return False


def hidden(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_hidden(parameter)]


READS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "sum": lambda model, p: p.sum(),
    "data": lambda model, p: p.data.abs(),
    "detached": lambda model, p: p.detach() + 1,
    "numpy": lambda model, p: p.detach().numpy(),
    "pointer": lambda model, p: p.data_ptr(),
    "item": lambda model, p: p.flatten()[0].item(),
    "copied": lambda model, p: torch.zeros_like(p).copy_(p),
    "deep copied": lambda model, p: copy.deepcopy(p),
    "cast": lambda model, p: p.double(),
    "saved": lambda model, p: torch.save(p, os.devnull),
    "broadcast": lambda model, p: dist.broadcast(p.detach(), 0),
    "norm": lambda model, p: torch.nn.utils.parameters_to_vector(model.parameters()),
    "part of the root": lambda model, p: model.first(inputs(model).to(p.dtype)),
    "written": lambda model, p: p.detach().zero_(),
    "data written": lambda model, p: p.data.copy_(torch.ones_like(p)),
    "initialised": lambda model, p: nn.init.zeros_(p),
    "with foreach": lambda model, p: torch._foreach_mul_([p.detach()], 2.0),
}


@on_ranks(2, backend=BACKENDS)
def test_what_is_read_or_written_too_early_raises() -> None:
    for stage in (1, 2):
        for dtype in (None, torch.bfloat16):
            check_early(stage, dtype)


def check_early(stage: int, dtype: torch.dtype | None) -> None:
    model, optimizer = make_small(overlaps=True, stage=stage, param_dtype=dtype, buffer_dtype=dtype)
    plain, plain_optimizer = make_small(overlaps=False, stage=stage, param_dtype=dtype, buffer_dtype=dtype)
    alias = model.first.weight.data  # of the same storage
    for one in ((model, optimizer), (plain, plain_optimizer)):
        step_once(*one)
    assert hidden(model) == [name for name, _ in model.named_parameters()]
    assert not hidden(plain)
    with raises(RuntimeError, ON_ITS_WAY):
        alias.sum()
    for what, read in READS.items():
        if what == "numpy" and dtype is not None:
            continue  # has no bfloat16
        with raises(RuntimeError, "[zeropg] parameter 'first.", ON_ITS_WAY, "full_parameters(model)"):
            read(model, model.first.weight)
            raise AssertionError(what)
    with torch.no_grad():
        assert equal(model(inputs(model)), plain(inputs(plain)))
    assert not hidden(model)
    assert equal(alias, model.first.weight.detach())


def load_checkpoint(model: Any, optimizer: Any, folder: str) -> None:
    zeropg.load_checkpoint(f"{folder}/before", model, optimizer)


def full_parameters(model: Any, writable: bool) -> None:
    with zeropg.full_parameters(model, writable=writable):
        assert not hidden(model)


def write_shards(model: Any) -> None:
    with zeropg.writable_shards(model):
        assert not hidden(model)


def backward_of_a_part(model: Any, optimizer: Any) -> None:
    model.blocks[1](inputs(model)).sum().backward()
    optimizer.zero_grad()


def offload(model: Any) -> None:
    model._zeropg.offload_states(["parameters", "masters"], moves=True, pin_memory=False, non_blocking=False)
    model._zeropg.reload_states(non_blocking=False)


def dcp_save(model: Any, optimizer: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/dcp")


# Every call that reads or writes weights, and whether it leaves them as they are.
JOINS: dict[str, tuple[Callable[[Any, Any, str], Any], bool]] = {
    "forward": (lambda model, optimizer, folder: model.eval()(inputs(model)), True),
    "state_dict": (lambda model, optimizer, folder: model.state_dict(), True),
    "state_dict of a unit": (lambda model, optimizer, folder: model.blocks[1].state_dict(), True),
    "full_parameters": (lambda model, optimizer, folder: full_parameters(model, False), True),
    "writable full_parameters": (lambda model, optimizer, folder: full_parameters(model, True), True),
    "local_shards": (lambda model, optimizer, folder: list(zeropg.local_shards(model)), True),
    "writable_shards": (lambda model, optimizer, folder: write_shards(model), True),
    "full_state_dict": (lambda model, optimizer, folder: zeropg.full_state_dict(model), True),
    "load_state_dict": (lambda model, optimizer, folder: model.load_state_dict(model.state_dict()), True),
    "load_full_state_dict": (
        lambda model, optimizer, folder: zeropg.load_full_state_dict(
            model, zeropg.full_state_dict(model, rank0_only=False)
        ),
        True,
    ),
    "save_checkpoint": (lambda model, optimizer, folder: zeropg.save_checkpoint(f"{folder}/c", model, optimizer), True),
    "load_checkpoint": (load_checkpoint, False),
    "dcp": (dcp_save, True),
    "export": (lambda model, optimizer, folder: zeropg.save_16bit_weights(model, f"{folder}/e"), True),
    "ema": (lambda model, optimizer, folder: zeropg.ema(model, 0.5).update(), True),
    "step without gradients": (lambda model, optimizer, folder: step_fresh(model), True),
    "backward of a part": (lambda model, optimizer, folder: backward_of_a_part(model, optimizer), True),
    "offload": (lambda model, optimizer, folder: offload(model), True),
    "state_dict of the optimizer": (lambda model, optimizer, folder: optimizer.state_dict(), True),
    "load_state_dict of the optimizer": (
        lambda model, optimizer, folder: optimizer.load_state_dict(optimizer.state_dict()),
        True,
    ),
    "full_optimizer_state_dict": (lambda model, optimizer, folder: zeropg.full_optimizer_state_dict(optimizer), True),
    "join_step": (lambda model, optimizer, folder: model._zeropg.join_step(), True),
}


def step_fresh(model: nn.Module) -> None:
    zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).step()


@on_ranks(2, backend=BACKENDS, timeout=120)
def test_every_call_that_needs_weights_waits_for_all(tmp_path: Path) -> None:
    plain, plain_optimizer = make_small(overlaps=False)
    step_once(plain, plain_optimizer)
    wanted = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    for what, (call, keeps) in JOINS.items():
        model, optimizer = make_small(overlaps=True)
        zeropg.save_checkpoint(f"{tmp_path}/before", model, optimizer)
        step_once(model, optimizer)
        assert hidden(model), what
        call(model, optimizer, str(tmp_path))
        assert not hidden(model), what
        if keeps:
            assert all(equal(parameter.detach(), wanted[name]) for name, parameter in model.named_parameters()), what


@on_ranks(2, backend=BACKENDS)
def test_a_unit_waits_for_its_own() -> None:
    model, optimizer = make_small(overlaps=True, stage=2)
    step_once(model, optimizer)
    seen = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: seen.append((index, hidden(model))))
    with torch.no_grad():
        model(inputs(model))
    names = [f"blocks.{index}.linear.{key}" for index in range(3) for key in ("weight", "bias")]
    assert seen == [(0, names[2:]), (1, names[4:]), (2, [])]
    step_once(model, optimizer)
    with torch.no_grad():  # a part of the model, another one on each rank
        model.blocks[dist.get_rank()](inputs(model))
    # Its own, and the root's, which may be shared with it.
    assert hidden(model) == [name for name in names if not name.startswith(f"blocks.{dist.get_rank()}")]
    step_once(model, optimizer)


def train_oddly(overlaps: bool) -> dict[str, torch.Tensor]:
    """Passes of every kind after a step that left weights on their way."""
    model, optimizer = make_small(overlaps=overlaps, stage=2)
    rank = dist.get_rank()
    step_once(model, optimizer)
    optimizer.step()  # without a forward, and without gradients
    step_once(model, optimizer)
    # User's collectives between the step and the forward, on the same group.
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 3
    # Evaluation.
    model.eval()
    with torch.inference_mode():
        model(inputs(model))
    model.train()
    step_once(model, optimizer)
    # A forward that raises between units, on one rank.

    def fail(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("between units")

    if rank == 0:
        plain, model.runs = model.runs, fail
        with raises(ArithmeticError, "between units"):
            model(inputs(model))
        model.runs = plain
    step_once(model, optimizer)
    # A unit that one rank skips.
    model.runs = lambda block, x: x if block is model.blocks[1] and rank == 1 else block(x)
    step_once(model, optimizer)
    # Blocks that run again in the backward.
    model.runs = lambda block, x: checkpoint(block, x, use_reentrant=False)
    step_once(model, optimizer)
    model.runs = lambda block, x: checkpoint(block, x, use_reentrant=True)
    step_once(model, optimizer)
    model.runs = lambda block, x: block(x)
    # Gradients of some units only, accumulated.
    with zeropg.no_sync(model):
        model(inputs(model)).square().sum().backward()
    model.blocks[0](inputs(model)).sum().backward()
    optimizer.step()
    # A backward in another thread.
    thread = threading.Thread(target=step_once, args=(model, optimizer))
    thread.start()
    thread.join()
    # Data that a program puts in place of a parameter's.
    model.first.weight.data = torch.full_like(model.first.weight, 0.25)
    model.first.bias.data = torch.ones(WIDTH)
    step_once(model, optimizer)
    # Parameters that are frozen, and unfrozen while others are on their way.
    model.blocks[2].requires_grad_(False)
    step_once(model, optimizer)
    model.blocks[2].requires_grad_(True)
    step_once(model, optimizer)
    step_once(model, optimizer)
    return zeropg.full_state_dict(model, rank0_only=False)


@on_ranks(2, backend=BACKENDS, timeout=120)
def test_passes_of_every_kind_have_the_same_bits() -> None:
    wanted, found = train_oddly(False), train_oddly(True)
    assert all(equal(found[name], wanted[name]) for name in wanted)


@on_ranks(2)
def test_several_optimizers_and_one_that_does_not_overlap() -> None:
    found = []
    for overlaps in ((False, False), (True, True), (True, False), (dist.get_rank() == 0, dist.get_rank() == 1)):
        torch.manual_seed(0)
        model = zeropg.fully_shard(Net(WIDTH), stage=1)
        halves = list(model.first.parameters()), list(model.blocks.parameters()) + list(model.norm.parameters())
        optimizers = [
            zeropg.shard_optimizer(torch.optim.AdamW(part, lr=0.1), model, overlap_step=overlap)
            for part, overlap in zip(halves, overlaps, strict=True)
        ]
        for _ in range(3):
            model(inputs(model)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(zeropg.full_state_dict(model, rank0_only=False))
    for other in found[1:]:
        assert all(equal(other[name], found[0][name]) for name in other)


@on_ranks(2, timeout=120)
def test_compiled_units_and_models() -> None:
    found = []
    for overlaps in (False, True):
        model, optimizer = make_small(overlaps=overlaps)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        for _ in range(3):
            step_once(model, optimizer)
        found.append(zeropg.full_state_dict(model, rank0_only=False))
    assert all(equal(found[1][name], found[0][name]) for name in found[0])


@on_ranks(2, backend=BACKENDS)
def test_two_threads_may_wait_for_one_unit() -> None:
    model, optimizer = make_small(overlaps=True)
    for _ in range(20):
        step_once(model, optimizer)
        start = threading.Barrier(4)
        failures: list[Exception] = []

        def evaluate(start: threading.Barrier = start, failures: list[Exception] = failures) -> None:
            try:
                start.wait()
                with torch.no_grad():
                    model.blocks[1](inputs(model))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=evaluate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@on_ranks(2)
def test_running_statistics_are_those_of_rank_0() -> None:
    model, optimizer = make_small(overlaps=True)
    step_once(model, optimizer)
    means = [torch.empty(WIDTH) for _ in range(2)]
    dist.all_gather(means, model.norm.running_mean)
    assert torch.equal(*means)


@on_ranks(2)
def test_stages_0_and_3_hide_nothing() -> None:
    model, optimizer = make_small(overlaps=True, stage=0)
    step_once(model, optimizer)
    assert not hidden(model)
    model, optimizer = make_small(overlaps=True, stage=3)
    step_once(model, optimizer)
    with raises(RuntimeError, "is sharded"):
        model.first.weight.sum()


class Late:
    """A core whose end_step does something else first."""

    def __init__(self, core: Any, before: Callable[[], None]) -> None:
        self._core, self._before = core, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def end_step(self, overlaps: bool) -> None:
        self._before()
        self._core.end_step(overlaps)


def interrupt(overlaps: bool) -> None:
    model, optimizer = make_small(overlaps=overlaps)
    plain, plain_optimizer = make_small(overlaps=False)
    store = dist.PrefixStore(f"interrupt {overlaps}", dist.distributed_c10d._get_default_store())
    step_once(plain, plain_optimizer)
    model(inputs(model)).square().sum().backward()
    if dist.get_rank() == 1:
        optimizer._core = Late(model._zeropg, lambda: store.wait(["interrupted"]))
        optimizer.step()
    elif overlaps:
        optimizer.step()
        with raises(Rung), torch.no_grad():
            ring_in(0.5)
            model(inputs(model))
    else:
        ring_in(0.5)
        with raises(Rung):
            optimizer.step()
    if dist.get_rank() == 0:
        assert len(hidden(model)) == len(list(model.parameters()))
        store.set("interrupted", "")
    optimizer._core = model._zeropg
    with torch.no_grad():
        assert equal(model.eval()(inputs(model)), plain.eval()(inputs(plain)))
    model.train(), plain.train()
    optimizer.zero_grad()
    for one in ((model, optimizer), (plain, plain_optimizer)):
        step_once(*one)
    wanted = zeropg.full_state_dict(plain, rank0_only=False)
    found = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_a_signal_interrupts_is_waited_for_later(overlaps: bool) -> None:
    run_ranks(2, interrupt, overlaps)


def die_before_the_weights_are_sent(backend: str) -> None:
    model, optimizer = make_small(overlaps=True)
    step_once(model, optimizer)
    model(inputs(model)).square().sum().backward()
    if dist.get_rank() == 1:
        optimizer._core = Late(model._zeropg, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with contextlib.suppress(RuntimeError) if backend == "gloo" else contextlib.nullcontext():
        optimizer.step()  # gloo may see at once that its connection is gone
    time.sleep(0.5)
    for use in (model, lambda x: model.state_dict(), lambda x: optimizer.step()):
        with raises(dist.DistBackendError, "[zeropg rank 0/2] step: the new weights of unit", "checkpoint"):
            use(inputs(model))
    assert is_hidden(model.first.weight), "stale"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_dies_is_an_error_of_the_next_call(backend: str) -> None:
    with RankPool(2, backend=backend) as pool:
        pool.run(die_before_the_weights_are_sent, backend, expect_death=[1])


def end_at_once() -> None:
    model, optimizer = make_small(overlaps=True, width=300)
    step_once(model, optimizer)  # and the pool destroys the group


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_may_end_while_weights_are_on_their_way(backend: str) -> None:
    for _ in range(3):
        with RankPool(2, backend=backend) as pool:
            pool.run(end_at_once)


class Adversaries(nn.Module):
    """Two parts that a program runs one by one; with a weight that both share, if asked."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        if shares:
            self.d[0].weight = self.g[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.g(x))


def play(overlaps: bool, stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = Adversaries(shares=True)
    model = zeropg.fully_shard(whole, stage=stage, units=[whole.g, whole.d])
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, overlap_step=overlaps)
    model(torch.ones(4, 8)).sum().backward()
    for turn in range(3):
        optimizer.step()
        optimizer.zero_grad()
        made = model.g(torch.full((4, 8), dist.get_rank() + turn + 1.0))
        model.d(made.detach()).square().sum().backward()
        optimizer.step()  # the weights of g that its backward needs are on their way again
        optimizer.zero_grad()
        model.d(made.detach())  # whose first weight lies in the root
        model(torch.ones(4, 8)).sum().backward()
    return zeropg.full_state_dict(model, rank0_only=False)


@on_ranks(2, backend=BACKENDS)
def test_parts_of_a_model_run_one_by_one() -> None:
    for stage in (1, 2):
        wanted, found = play(False, stage), play(True, stage)
        assert all(value.isfinite().all() for value in wanted.values())
        assert all(equal(found[name], wanted[name]) for name in wanted)


@on_ranks(2, backend=BACKENDS)
def test_a_backward_waits_before_it_reads_a_weight() -> None:
    found = []
    for overlaps in (False, True):
        torch.manual_seed(0)
        whole = Adversaries(shares=False)
        model: Any = zeropg.fully_shard(whole, stage=2, units=[whole.g, whole.d])
        of_d = zeropg.shard_optimizer(torch.optim.SGD(model.d.parameters(), lr=0.1), model, overlap_step=overlaps)
        for _ in range(2):
            made = model.g(torch.ones(4, 8))
            model.d(made.detach()).sum().backward()
            of_d.step()
            of_d.zero_grad()
            model.d.requires_grad_(False)
            model.d(made).sum().backward()
            model.d.requires_grad_(True)
            model.zero_grad()
        found.append(zeropg.full_state_dict(model, rank0_only=False))
    assert all(equal(found[0][name], found[1][name]) for name in found[0])


@on_ranks(2, backend=BACKENDS)
def test_an_interrupt_beside_running_statistics_loses_no_update() -> None:
    module: Any = importlib.import_module("zeropg.optim.shard_optimizer")
    broadcast = module.broadcast_running_statistics

    def interrupted(*arguments: Any) -> None:
        broadcast(*arguments)
        if dist.get_rank() == 1:
            raise KeyboardInterrupt

    results = []
    for is_rung in (False, True):
        module.broadcast_running_statistics = interrupted if is_rung else broadcast
        for overlaps in (False, True):
            model, optimizer = make_small(overlaps=overlaps)
            with contextlib.suppress(KeyboardInterrupt):
                step_once(model, optimizer)
            results.append(zeropg.full_state_dict(model, rank0_only=False))
    module.broadcast_running_statistics = broadcast  # other tests run in this process
    assert all(equal(result[name], value) for result in results for name, value in results[0].items())


def grow() -> None:
    torch.set_num_threads(1)
    widths = (32, 64, 96, 128, 160)
    layers = [nn.Linear(width, following) for width, following in itertools.pairwise(widths)]
    model = zeropg.fully_shard(nn.Sequential(*layers), stage=1, units=layers, compression=Plan(weights=BlockQuant(8)))
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, widths[0])).sum().backward()
    optimizer.step()
    sizes = sorted(group.total_numel for group in model._zeropg.flat_groups if group.sends_differences)
    held = model._zeropg.memory_report()["gathered"]
    assert held <= 6 * sum(sizes[-2:]), (held, sizes)


def test_a_step_that_waits_holds_two_differences(rank_pool: Callable[..., RankPool]) -> None:
    rank_pool(2, "zeropg").run(grow, timeout=60)
