"""Units that are gathered ahead: the same bits as without on any path, and no more memory than said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropg
from tests.sharding.ranks import close, equal, on_ranks, raises
from tests.spawn import RankPool, SeparateHosts

WIDTH = 8
BLOCKS = 4
ALL = tuple(range(BLOCKS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.has_bias = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias if self.has_bias else None).tanh()


class Net(nn.Module):
    """Blocks that a program runs in any order; the first one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[0].requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor, path: Sequence[int] = ALL, is_checkpointed: bool = False) -> torch.Tensor:
        x = self.embedding(x)
        for index in path:
            if index < 0:
                raise ArithmeticError("in the middle of a forward")
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
        return x


Step = Callable[[nn.Module, torch.Tensor], None]


def on_path(*path: int, is_checkpointed: bool = False) -> Step:
    return lambda model, x: model(x, path, is_checkpointed).square().sum().backward()


def evaluate(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        for path in (ALL, (0, 1)):
            model(x, path)
    on_path(*ALL)(model, x)


def fail_and_try_again(model: nn.Module, x: torch.Tensor) -> None:
    with suppress(ArithmeticError):
        model(x, (0, 1, -1))
    on_path(*ALL)(model, x)


def differentiate(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    on_path(*ALL)(model, x)


def forward_twice(model: nn.Module, x: torch.Tensor) -> None:
    model(x)  # nothing follows
    (model(x).sum() + model(x, (3, 2, 1)).sum()).backward()


def accumulate(model: nn.Module, x: torch.Tensor) -> None:
    if isinstance(model, zeropg.FullyShardedModule):
        with zeropg.no_sync(model):
            on_path(0, 2)(model, x)
    else:
        on_path(0, 2)(model, x)
    on_path(*ALL)(model, x)


def look(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x, (0, 1)).square().sum()
    if isinstance(model, zeropg.FullyShardedModule):
        with zeropg.full_parameters(model):
            pass
    loss = loss + model(x).square().sum()
    loss.backward()


def write(model: nn.Module, x: torch.Tensor) -> None:
    model(x, (0, 1))  # the next ones are on their way
    if isinstance(model, zeropg.FullyShardedModule):
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.blocks[2].linear.weight.mul_(0.5)
    else:
        with torch.no_grad():
            model.blocks[2].linear.weight.mul_(0.5)
    on_path(*ALL)(model, x)


STEPS: list[Step] = [
    on_path(*ALL),
    on_path(*ALL),
    on_path(0, 1, 3),
    on_path(*ALL),
    on_path(3, 1, 2, 0),
    on_path(0, 1, 1, 1, 2, 1, 3),
    on_path(0, 1, 1, 1, 2, 1, 3),
    on_path(*ALL, is_checkpointed=True),
    on_path(*ALL, is_checkpointed=True),
    on_path(),
    evaluate,
    evaluate,
    fail_and_try_again,
    fail_and_try_again,
    differentiate,
    forward_twice,
    forward_twice,
    accumulate,
    accumulate,
    look,
    look,
    write,
    write,
    on_path(*ALL),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(5)
    for step in STEPS:
        step(model, torch.randn(3, WIDTH, generator=generator, dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()


def sharded(prefetch_numel: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zeropg.fully_shard(Net(), prefetch_numel=prefetch_numel)
    assert model._zeropg.fetch_name == "gathered"
    return model, zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    with zeropg.full_parameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def check_trained_alike(pairs: Iterable[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """All of the models come to the same bits, and to what a plain process comes to. Each is made in its turn."""
    torch.set_num_threads(1)
    plain = Net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    results = []
    for model, optimizer in pairs:
        train(model, optimizer)
        results.append(weights_of(model))
    for result in results:
        assert all(equal(*pair) for pair in zip(result, results[0], strict=True))
        assert all(close(*pair) for pair in zip(result, plain.parameters(), strict=True))


def check_any_program() -> None:
    check_trained_alike(sharded(prefetch_numel) for prefetch_numel in (0, 1, 150, 10**9))


@on_ranks(2, backend="gloo", timeout=120)
def test_any_program_over_gloo() -> None:
    check_any_program()


def test_any_program_on_two_nodes(rank_pool: Callable[..., RankPool]) -> None:
    rank_pool(2, "zeropg", SeparateHosts(hosts=(0, 1))).run(check_any_program, timeout=120)


@on_ranks(2, backend="gloo")
def test_two_models_take_turns() -> None:
    pairs = [sharded(numel) for numel in (1, 10**9)]
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(4):
        x = torch.full((2, WIDTH), 0.1 * step, dtype=torch.float64)
        losses = [model(x).square().sum() for model, _ in (*pairs, (plain, None))]
        assert all(close(loss, losses[-1]) for loss in losses)
        for loss in losses:
            loss.backward()
        for _, optimizer in (*pairs, (plain, plain_optimizer)):
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2, backend="gloo")
def test_a_rank_without_some_gradients_gathers_the_same() -> None:
    """A unit of it then stays whole until the end of backward, which must not change what it gathers ahead."""
    results = []
    for prefetch_numel in (0, 1, 10**9):
        model, optimizer = sharded(prefetch_numel)
        model.blocks[2].has_bias = dist.get_rank() == 0
        for path in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 1, 0), (0, 1, 2, 3), (2, 1, 0, 3)):
            on_path(*path)(model, torch.ones(2, WIDTH, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights_of(model))
    assert all(equal(*pair) for result in results for pair in zip(result, results[0], strict=True))


def take_another_path(how: str, prefetch_numel: int) -> str:
    """The error of ranks whose paths differ after two steps on which they did not."""
    model = zeropg.fully_shard(Net(), prefetch_numel=prefetch_numel, process_group=dist.new_group())
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(2):
        on_path(*ALL)(model, x)
    expected = Net()
    is_first = dist.get_rank() == 0
    try:
        if how == "grad mode":  # a root with a graph stays whole for its backward
            with torch.set_grad_enabled(is_first):
                model(x, (0, 1))
                model(x, (0, 1))
        else:
            with torch.set_grad_enabled(how == "training"):
                path = (0, 1, 2, 3) if is_first else (0, 2, 1, 3)
                assert close(model(x, path), expected(x, path))
    except RuntimeError as error:
        return str(error)
    return "none"


WAYS = ("training", "evaluation", "grad mode")


@on_ranks(2, backend="gloo")
def test_paths_that_differ_are_an_error_at_once() -> None:
    """What was gathered ahead for one path is not taken on another."""
    rank = dist.get_rank()
    for how in WAYS:
        for prefetch_numel in (0, 1, 150, 10**9):
            error = take_another_path(how, prefetch_numel)
            if error == "none" and prefetch_numel == 10**9:  # all blocks had been gathered before the paths parted
                continue
            assert f"[zeropg rank {rank}/2] unshard of" in error and "the same units in the same order" in error, error
            assert f"rank {1 - rank} gathers unit '" in error, error


@pytest.mark.parametrize("how", WAYS)
def test_paths_that_differ_between_nodes_are_an_error_at_once(how: str) -> None:
    """Blocks have one size; so only their numbers tell that they are different ones."""
    with RankPool(2, backend="zeropg", place=SeparateHosts(hosts=(0, 1))) as pool:
        errors = pool.run(take_another_path, how, 1, timeout=30)
    for rank, error in enumerate(errors):
        assert f"[zeropg rank {rank}/2] unshard of" in error and "the same units in the same order" in error, error
        assert "different calls" in error and error.count(", item ") == 2, error


@on_ranks(2, backend="gloo")
def test_memory_is_bounded() -> None:
    block = 96  # elements: weight and bias, each rounded up to 32
    held = []
    for prefetch_numel in (0, 1, 2 * block, 10**9):
        model, _ = sharded(prefetch_numel)
        for _ in range(3):
            on_path(*ALL)(model, torch.ones(2, WIDTH, dtype=torch.float64))
        sizes = {group.unit_name: group.total_numel for group in model._zeropg.flat_groups}
        held.append(model._zeropg.memory_report()["gathered"] / 8 / max(sizes.values()))
    nothing, one, two, all_of_them = held
    assert nothing < one <= nothing + 1 and one <= two <= nothing + 2
    assert all_of_them <= BLOCKS + 2, "all blocks for the backward while the last one is in its forward, and the root"


@on_ranks(2, backend="gloo")
def test_bad_arguments() -> None:
    for value in (-1, 1.5, True, None):
        with raises(ValueError, "prefetch_numel"):
            zeropg.fully_shard(Net(), prefetch_numel=value)
