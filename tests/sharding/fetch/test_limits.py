"""What stays whole, and how much may be whole: fewer gathers with the same bits, and no more memory than said."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropg
from tests.sharding.fetch.test_prefetch import ALL, BLOCKS, WIDTH, Net, Step, check_trained_alike, on_path, weights_of
from tests.sharding.ranks import close, equal, on_ranks, raises
from tests.spawn import RankPool, SeparateHosts

BLOCK = WIDTH * WIDTH + WIDTH  # elements; the root has as many
EVERYTHING = 10**9
PER_NODE = SeparateHosts(hosts=(0, 0, 1, 1))

LIMITS: list[dict[str, Any]] = [
    {},
    {"keep_numel": BLOCK},
    {"keep_numel": 2 * BLOCK, "prefetch_numel": 0},
    {"keep_numel": EVERYTHING, "prefetch_numel": EVERYTHING},
    {"persistent_numel": BLOCK},
    {"persistent_numel": BLOCK, "max_whole_numel": 3 * BLOCK, "keep_numel": EVERYTHING},
    {"max_whole_numel": 0, "keep_numel": EVERYTHING, "prefetch_numel": EVERYTHING},
    {"max_whole_numel": 4 * BLOCK, "keep_numel": EVERYTHING, "prefetch_numel": 2 * BLOCK},
]


def sharded(**limits: Any) -> nn.Module:
    model = zeropg.fully_shard(Net(), **limits)
    assert model._zeropg.fetch_name.startswith("gathered")
    return model


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)


def ones() -> torch.Tensor:
    return torch.ones(2, WIDTH, dtype=torch.float64)


def forward(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def gathers_in(model: nn.Module, step: Step) -> Counter[str]:
    """How often each unit is gathered meanwhile, by its name."""
    model._zeropg.start_log()
    step(model, ones())
    events, _ = model._zeropg.stop_log()
    return Counter(unit for kind, unit, *_ in events if kind == "gather")


def gathers_of_a_step(step: Step, **limits: Any) -> Counter[str]:
    """Of one that has been done before."""
    model, optimizer = with_optimizer(sharded(**limits))
    counts = Counter[str]()
    for _ in range(3):
        counts = gathers_in(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return counts


def check_any_program() -> None:
    check_trained_alike(with_optimizer(sharded(**limits)) for limits in LIMITS)


@pytest.mark.soak
@on_ranks(2, backend="gloo", timeout=180)
def test_any_program_over_gloo() -> None:
    check_any_program()


def test_any_program_with_a_copy_per_node(rank_pool: Callable[..., RankPool]) -> None:
    rank_pool(4, "zeropg", PER_NODE).run(check_any_program, timeout=240)


def reentrant(model: nn.Module, x: torch.Tensor) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = model.embedding(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    if isinstance(model, zeropg.FullyShardedModule):
        model.run = run
        zeropg.register_forward_method(model, "run")
        run = model.run
    run(x).square().sum().backward()


WAYS: dict[str, Step] = {
    "as it is": on_path(*ALL),
    "checkpointed": on_path(*ALL, is_checkpointed=True),
    "checkpointed by a backward inside": reentrant,
}


@on_ranks(2, backend="gloo", timeout=120)
def test_what_is_kept_is_gathered_once() -> None:
    for way, step in WAYS.items():
        for prefetch_numel in (0, 1, EVERYTHING):
            for kept, keep_numel in ((0, 0), (0, BLOCK - 1), (1, BLOCK), (2, 3 * BLOCK - 1), (4, EVERYTHING)):
                counts = gathers_of_a_step(step, keep_numel=keep_numel, prefetch_numel=prefetch_numel)
                once = {f"blocks.{index}" for index in range(BLOCKS - kept, BLOCKS)} | {""}
                wanted = {name: 1 if name in once else 2 for name in ("", *(f"blocks.{i}" for i in ALL))}
                assert counts == wanted, (way, prefetch_numel, keep_numel)


@on_ranks(2, backend="gloo")
def test_a_unit_that_is_used_twice() -> None:
    path = (0, 1, 1, 2, 1, 3)
    assert gathers_of_a_step(on_path(*path), prefetch_numel=0)["blocks.1"] >= 4
    for prefetch_numel in (0, 1):
        counts = gathers_of_a_step(on_path(*path), keep_numel=EVERYTHING, prefetch_numel=prefetch_numel)
        assert counts["blocks.0"] == counts["blocks.2"] == counts["blocks.3"] == 1
        assert counts["blocks.1"] <= 2, "once in the forward"


@on_ranks(2, backend="gloo")
def test_units_that_persist_are_gathered_once_between_steps() -> None:
    model, optimizer = with_optimizer(sharded(persistent_numel=BLOCK))
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    once = dict.fromkeys(("", *(f"blocks.{i}" for i in ALL)), 1)
    for _ in range(3):
        with torch.no_grad():
            assert gathers_in(model, forward) == once
        with zeropg.no_sync(model):
            assert not gathers_in(model, on_path(*ALL))
        assert not gathers_in(model, on_path(*ALL))
        for _ in range(2):
            on_path(*ALL)(plain, ones())
        assert equal(model.blocks[0].linear.weight.detach(), plain.blocks[0].linear.weight.detach())
        for stepper in (optimizer, plain_optimizer):
            stepper.step()
            stepper.zero_grad()
        with raises(RuntimeError, "blocks.1.linear.weight"):
            model.blocks[1].linear.weight.sum()
        assert close(model(ones()).detach(), plain(ones()).detach()), "values of before the step"
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.blocks[0].linear.weight.mul_(0.5)
        with torch.no_grad():
            plain.blocks[0].linear.weight.mul_(0.5)


@on_ranks(2, backend="gloo")
def test_some_units_persist() -> None:
    """Those that do not fit are gathered as before, in the forward and in the backward."""
    names = [f"blocks.{index}" for index in ALL]
    for prefetch_numel in (0, 1):
        counts = gathers_of_a_step(
            on_path(*ALL), persistent_numel=BLOCK, max_whole_numel=3 * BLOCK, prefetch_numel=prefetch_numel
        )
        assert counts == {"": 1, **dict(zip(names, (1, 1, 2, 2), strict=True))}


@on_ranks(2, backend="gloo")
def test_all_together_is_bounded() -> None:
    for blocks in (1, 2, 3, 4):
        model = sharded(keep_numel=EVERYTHING, prefetch_numel=EVERYTHING, max_whole_numel=(1 + blocks) * BLOCK)
        for path in (ALL, ALL, (0, 1, 1, 3), ALL, (0, 1, 1, 3), ALL):
            on_path(*path)(model, ones())
        largest = max(group.total_numel for group in model._zeropg.flat_groups)
        held = model._zeropg.memory_report()["gathered"] / 8 / largest
        assert held <= 1 + blocks, (blocks, held)
        counts = gathers_in(model, on_path(*ALL))
        assert sum(counts.values()) <= 1 + 2 * BLOCKS - (blocks - 1), (blocks, counts)


@on_ranks(2, backend="gloo")
def test_nothing_is_kept_without_a_backward() -> None:
    model = sharded(keep_numel=EVERYTHING)
    weight = model.blocks[3].linear.weight
    with torch.no_grad():
        model(ones())
        with raises(RuntimeError, "blocks.3.linear.weight"):
            weight.sum()
    model(ones())
    assert equal(weight.detach().clone(), Net().blocks[3].linear.weight.detach())
    with torch.no_grad():  # another forward, and what was kept goes
        assert sum(gathers_in(model, forward).values()) == BLOCKS
    with raises(RuntimeError, "blocks.3.linear.weight"):
        weight.sum()


@on_ranks(2, backend="gloo")
def test_a_rank_without_some_gradients_gathers_the_same() -> None:
    results = []
    for limits in LIMITS:
        model, optimizer = with_optimizer(sharded(**limits))
        model.blocks[2].has_bias = dist.get_rank() == 0
        for path in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 1, 0), (0, 1, 2, 3), (2, 1, 0, 3)):
            on_path(*path)(model, ones())
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights_of(model))
    assert all(equal(*pair) for result in results for pair in zip(result, results[0], strict=True))


def take_another_path(is_training: bool) -> str:
    model = zeropg.fully_shard(Net(), keep_numel=2 * BLOCK, process_group=dist.new_group())
    for _ in range(2):
        on_path(*ALL)(model, ones())
    try:
        with torch.set_grad_enabled(is_training):
            model(ones(), (0, 1, 2, 3) if dist.get_rank() == 0 else (0, 2, 1, 3))
    except RuntimeError as error:
        return str(error)
    return "none"


@on_ranks(2, backend="gloo")
def test_paths_that_differ_are_an_error_at_once() -> None:
    for is_training in (True, False):
        assert "the same units in the same order" in take_another_path(is_training)


@on_ranks(2, backend="gloo")
def test_bad_arguments() -> None:
    for name in ("keep_numel", "persistent_numel", "max_whole_numel"):
        for value in (-1, 1.5, True, "1"):
            with raises(ValueError, f"{name} is {value!r}", "a number of elements"):
                zeropg.fully_shard(Net(), **{name: value})
        with raises(ValueError, f"{name}=", "the same arguments"):
            zeropg.fully_shard(Net(), **{name: 5 + dist.get_rank()})
        with raises(ValueError, name if dist.get_rank() == 1 else "rank 1 raised"):
            zeropg.fully_shard(Net(), **{name: -dist.get_rank()})
    for limits in ({"keep_numel": 1}, {"max_whole_numel": 0}):
        with raises(ValueError, *limits, "reshard_after_forward=False"):
            zeropg.fully_shard(Net(), reshard_after_forward=False, **limits)
    zeropg.fully_shard(Net(), keep_numel=2**70, persistent_numel=2**70, max_whole_numel=2**70)


def what_it_says(stage: int, limits: dict[str, Any]) -> str:
    torch.set_num_threads(1)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        zeropg.fully_shard(Net(), stage=stage, **limits)
    return said.getvalue()


@pytest.mark.parametrize("stage", [1, 3])
def test_it_says_where_limits_have_no_effect(rank_pool: Callable[..., RankPool], stage: int) -> None:
    said, _ = rank_pool(2, "zeropg").run(what_it_says, stage, {"keep_numel": 7, "max_whole_numel": 9})
    assert "keep_numel, max_whole_numel changes nothing, since no units are gathered" in said
    said, _ = rank_pool(2, "zeropg").run(what_it_says, stage, {})
    assert "changes nothing" not in said


def test_it_says_where_the_root_leaves_no_room(rank_pool: Callable[..., RankPool]) -> None:
    pool = rank_pool(2, "gloo")
    for bound, is_said in ((BLOCK - 1, True), (3 * BLOCK, False)):
        said, _ = pool.run(what_it_says, 3, {"max_whole_numel": bound})
        assert (f"max_whole_numel is {bound:,}, and the root" in said) is is_said
