"""Random sequences of what programs do to a model, its gradients and its optimizer, sharded beside a plain process.

Each seed is one program: what it does and in which stage is drawn from it. After every action that can see values they
must be those of the plain process. ZEROPG_PROGRAM_SEED=N runs program N alone, as a failure's message says;
ZEROPG_PROGRAM_SECONDS=N goes on for so long with programs that nobody has run.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.sharding.uses.programs import Broken, Run, loss_of
from tests.spawn import THIS_MACHINE, Place, SeparateHosts

PROGRAMS, PROGRAMS_IN_SOAK = 15, 40
LENGTH = 25  # actions in a program
ROWS = 12
TOLERANCE = 1e-9

GROUPS: dict[str, tuple[int, str, Place]] = {
    "shared": (2, "zeropg", THIS_MACHINE),
    "three ranks": (3, "zeropg", THIS_MACHINE),
    "gloo": (2, "gloo", THIS_MACHINE),
    "two nodes": (3, "zeropg", SeparateHosts(hosts=(0, 0, 1))),
}


class Pair:
    """The same model twice, plain and sharded, and what programs keep of each."""

    def __init__(self, stage: int, dice: random.Random, folder: str) -> None:
        self.stage = stage
        self.dice = dice
        self.folder = folder
        self.runs = (Run(None, torch.float64), Run(stage, torch.float64))
        options: dict[str, Any] = {"max_norm": dice.choice([None, None, 0.8])}
        self.models: tuple[Any, Any] = tuple(run.model(**options) for run in self.runs)  # type: ignore[assignment]
        kind = dice.choice([torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
        options = {"momentum": 0.5} if kind is torch.optim.SGD else {}
        optimizers = [kind(model.parameters(), lr=0.02, **options) for model in self.models]
        self.optimizers = (optimizers[0], zeropg.shard_optimizer(optimizers[1], self.models[1]))
        self.kept: list[dict[str, torch.Tensor]] = [{}, {}]

    def both(self, action: Callable[[Run, Any], Any]) -> list[Any]:
        return [action(run, model) for run, model in zip(self.runs, self.models, strict=True)]

    def name(self) -> str:
        return self.dice.choice([name for name, _ in self.models[0].named_parameters()])

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.dice.randrange(10**6))
        tokens = torch.randint(0, 11, (ROWS, 4), generator=generator)
        return tokens, torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)

    def check(self, what: str, values: list[dict[str, torch.Tensor | None]]) -> None:
        wanted, found = values
        assert wanted.keys() == found.keys(), (what, wanted.keys() ^ found.keys())
        for name, value in wanted.items():
            other = found[name]
            assert (value is None) == (other is None), (what, name, "None" if other is None else "not None")
            if value is not None and other is not None:
                difference = (value - other).abs().max().item()
                assert difference <= TOLERANCE * max(1.0, value.abs().max().item()), (what, name, difference)


def backward(pair: Pair) -> None:
    batch = pair.batch()
    pair.both(lambda run, model: loss_of(model, *map(run.mine, batch)).backward())


def backward_without_communication(pair: Pair) -> None:
    for is_last in (False, True):
        batch = pair.batch()
        for run, model in zip(pair.runs, pair.models, strict=True):
            with contextlib.nullcontext() if run.is_plain or is_last else zeropg.no_sync(model):
                loss_of(model, *map(run.mine, batch)).backward()


def backward_with_a_penalty(pair: Pair) -> None:
    x = torch.linspace(-1, 1, ROWS * 6, dtype=torch.float64).view(ROWS, 6)

    def penalize(run: Run, model: Any) -> None:
        mine = run.mine(x).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(mine).tanh().sum(), mine, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()

    pair.both(penalize)


def two_losses_in_one_backward(pair: Pair) -> None:
    first, second = pair.batch(), pair.batch()
    pair.both(
        lambda run, model: (loss_of(model, *map(run.mine, first)) + loss_of(model, *map(run.mine, second))).backward()
    )


def step(pair: Pair) -> None:
    for optimizer in pair.optimizers:
        optimizer.step()


def zero_grad(pair: Pair) -> None:
    to_none = pair.dice.random() < 0.7
    through_model = pair.dice.random() < 0.5
    for target in pair.models if through_model else pair.optimizers:
        target.zero_grad(set_to_none=to_none)


def clip(pair: Pair) -> None:
    limit = pair.dice.choice([0.1, 1.0])
    norms = [
        torch.nn.utils.clip_grad_norm_(pair.models[0].parameters(), limit),
        zeropg.clip_grad_norm_(pair.models[1], limit),
    ]
    pair.check("norm", [{"norm": norm.double()} for norm in norms])


def change_rate(pair: Pair) -> None:
    rate = pair.dice.choice([0.01, 0.02, 0.05])
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = rate


def write_directly(pair: Pair) -> None:
    if pair.stage == 3:
        return
    name, limit, how = pair.name(), pair.dice.choice([0.05, 0.3]), pair.dice.randrange(3)

    @torch.no_grad()
    def write(run: Run, model: Any) -> None:
        parameter = model.get_parameter(name)
        if how == 0:
            parameter.clamp_(-limit, limit)
        elif how == 1:
            parameter.data = parameter.data * 0.9
        else:
            parameter.data[:1].mul_(-limit)

    pair.both(write)


def write_inside_full_parameters(pair: Pair) -> None:
    name = pair.name()
    raises = pair.dice.random() < 0.3

    def write(run: Run, model: Any) -> None:
        with contextlib.suppress(Broken), torch.no_grad(), run.whole(model, writable=True):
            model.get_parameter(name).mul_(0.8)
            if raises:
                raise Broken
            model.head.bias.add_(0.01)

    pair.both(write)


def write_shards(pair: Pair) -> None:
    with torch.no_grad():
        for parameter in pair.models[0].parameters():
            parameter.mul_(0.95)
        with zeropg.writable_shards(pair.models[1]) as shards:
            for _, tensor, _, _ in shards:
                tensor.mul_(0.95)


def write_in_forward(pair: Pair) -> None:
    batch = pair.batch()

    def run_once(run: Run, model: Any) -> None:
        def shrink(module: Any, _: Any) -> None:
            module.scale.data.mul_(0.9)

        handle = model.blocks[1].register_forward_pre_hook(shrink)
        loss_of(model, *map(run.mine, batch)).backward()
        handle.remove()

    pair.both(run_once)


def edit_gradients(pair: Pair) -> None:
    name, how = pair.name(), pair.dice.randrange(4)

    def edit(run: Run, model: Any) -> None:
        parameter = model.get_parameter(name)
        with run.whole_gradients(model):
            if parameter.grad is None:
                return
            if how == 0:
                parameter.grad.mul_(0.5)
            elif how == 1:
                parameter.grad = parameter.grad + 0.01
            elif how == 2:
                parameter.grad.data = parameter.grad.data * 2
            else:
                parameter.grad = None

    pair.both(edit)


def put_a_gradient(pair: Pair) -> None:
    name = pair.name()

    def put(run: Run, model: Any) -> None:
        parameter = model.get_parameter(name)
        parameter.grad = torch.full_like(parameter, 0.02)

    pair.both(put)


def drop_a_gradient(pair: Pair) -> None:
    name = pair.name()
    pair.both(lambda run, model: setattr(model.get_parameter(name), "grad", None))


def keep_a_gradient(pair: Pair) -> None:
    """What is kept must not change when the gradient is dropped; what accumulates in place changes it, as in torch."""
    if pair.stage >= 2:
        return
    name = pair.name()
    for kept, model in zip(pair.kept, pair.models, strict=True):
        kept.pop(name, None)
        gradient = model.get_parameter(name).grad
        if gradient is not None:
            kept[name] = gradient
            model.get_parameter(name).grad = None


def use_a_kept_gradient(pair: Pair) -> None:
    if not pair.kept[0]:
        return
    name = pair.dice.choice(sorted(pair.kept[0]))
    pair.check("kept", [{name: kept[name]} for kept in pair.kept])
    for kept, model in zip(pair.kept, pair.models, strict=True):
        parameter = model.get_parameter(name)
        gradient = kept.pop(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def flip_requires_grad(pair: Pair) -> None:
    block = pair.dice.randrange(3)
    flag = pair.dice.random() < 0.5
    pair.both(lambda run, model: model.blocks[block].requires_grad_(flag))


def evaluate(pair: Pair) -> None:
    tokens, _ = pair.batch()
    with torch.no_grad():
        outputs = pair.both(lambda run, model: model(run.mine(tokens)))
    pair.check("output", [{"output": pair.runs[1].mine(outputs[0])}, {"output": outputs[1]}])
    unite_renormalized_rows(pair)


def unite_renormalized_rows(pair: Pair) -> None:
    """Ranks have renormalized different rows, and no backward has united them: to write to them now is an error."""
    if pair.models[1].table.max_norm is not None:
        look_at_parameters(pair)


def look_at_parameters(pair: Pair) -> None:
    def look(run: Run, model: Any) -> dict[str, torch.Tensor]:
        with run.whole(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    pair.check("parameters", pair.both(look))


def look_at_gradients(pair: Pair) -> None:
    def look(run: Run, model: Any) -> dict[str, torch.Tensor | None]:
        with run.whole_gradients(model):
            return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    pair.check("gradients", pair.both(look))


def look_at_the_state_dict(pair: Pair) -> None:
    pair.check("state dict", [pair.runs[0].values(), pair.runs[1].values()])


def fail_in_forward(pair: Pair) -> None:
    batch = pair.batch()

    def fail(run: Run, model: Any) -> None:
        def raise_it(*_: Any) -> None:
            raise Broken

        handle = model.blocks[2].register_forward_pre_hook(raise_it)
        with contextlib.suppress(Broken):
            loss_of(model, *map(run.mine, batch))
        handle.remove()

    pair.both(fail)
    unite_renormalized_rows(pair)


def fail_in_backward(pair: Pair) -> None:
    batch = pair.batch()

    def fail(run: Run, model: Any) -> None:
        def raise_it(_: torch.Tensor) -> torch.Tensor:
            raise Broken

        if not model.blocks[0].scale.requires_grad:
            return
        handle = model.blocks[0].scale.register_hook(raise_it)
        with contextlib.suppress(Broken):
            loss_of(model, *map(run.mine, batch)).backward()
        handle.remove()
        model.zero_grad()

    pair.both(fail)
    unite_renormalized_rows(pair)


def save_and_load(pair: Pair) -> None:
    path = os.path.join(pair.folder, "checkpoint")
    zeropg.save_checkpoint(path, pair.models[1], pair.optimizers[1])
    with torch.no_grad(), zeropg.full_parameters(pair.models[1], writable=True):
        for parameter in pair.models[1].parameters():
            parameter.zero_()
    zeropg.load_checkpoint(path, pair.models[1], pair.optimizers[1])


ACTIONS: dict[Callable[[Pair], None], int] = {
    backward: 6,
    step: 6,
    zero_grad: 4,
    backward_without_communication: 2,
    backward_with_a_penalty: 1,
    two_losses_in_one_backward: 1,
    clip: 2,
    change_rate: 1,
    write_directly: 3,
    write_inside_full_parameters: 2,
    write_shards: 1,
    write_in_forward: 1,
    edit_gradients: 3,
    put_a_gradient: 1,
    drop_a_gradient: 1,
    keep_a_gradient: 2,
    use_a_kept_gradient: 2,
    flip_requires_grad: 2,
    evaluate: 1,
    look_at_parameters: 1,
    look_at_gradients: 1,
    look_at_the_state_dict: 1,
    fail_in_forward: 1,
    fail_in_backward: 1,
    save_and_load: 1,
}


def run_program(seed: int, folder: str) -> None:
    dice = random.Random(seed)
    stage = dice.randrange(4)
    done = [f"stage {stage}"]
    try:
        pair = Pair(stage, dice, folder)
        for _ in range(LENGTH):
            action = dice.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            done.append(action.__name__)
            action(pair)
        look_at_gradients(pair)
        look_at_the_state_dict(pair)
    except Exception as error:
        raise AssertionError(f"program {seed} (ZEROPG_PROGRAM_SEED={seed}): {done}: {error}") from error


def run_programs(seeds: list[int], seconds: float, folder: str) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            run_program(seed, folder)
        drawn = torch.zeros(1, dtype=torch.int64)
        while True:  # rank 0 says with which seed, and whether, programs go on
            drawn[0] = random.SystemRandom().randrange(10**9) if time.monotonic() - start < seconds else -1
            dist.broadcast(drawn, src=0)
            if drawn.item() < 0:
                return
            run_program(int(drawn.item()), folder)


@pytest.mark.parametrize("group", GROUPS)
def test_random_programs_equal_the_plain_process(rank_pool: Any, group: str) -> None:
    world_size, backend, place = GROUPS[group]
    seconds = float(os.environ.get("ZEROPG_PROGRAM_SECONDS", 0))
    seeds = list(range(PROGRAMS_IN_SOAK if seconds > 0 else PROGRAMS))
    if "ZEROPG_PROGRAM_SEED" in os.environ:
        seeds = [int(os.environ["ZEROPG_PROGRAM_SEED"])]
    with tempfile.TemporaryDirectory() as folder:
        pool = rank_pool(world_size, backend, place)
        pool.run(run_programs, seeds, seconds, folder, timeout=seconds + 240)
