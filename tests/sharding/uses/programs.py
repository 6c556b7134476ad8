"""Small programs that read and write parameters, gradients and optimizer state in the ways that users do.

Each runs twice with the same code: in a plain process on whole batches, and sharded on each rank's part of them. What
is not the same for both goes through `Run`, which is either.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import zeropg

RATE = 0.1
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale + x


class Net(nn.Module):
    """A table, blocks that are units, a head; `width` is such that slices cut through parameters."""

    def __init__(self, *, max_norm: float | None = None, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width, max_norm=max_norm)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)
        self.wrap: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).mean(1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) if not tokens.is_floating_point() else tokens
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.head(x)


class Run:
    """One execution of a program: plain (`stage` None) or sharded."""

    def __init__(
        self,
        stage: int | None,
        dtype: torch.dtype,
        param_dtype: torch.dtype | None = None,
        *,
        overlap_step: bool | None = None,
    ) -> None:
        self.stage = stage
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.overlap_step = overlap_step
        self.models: dict[str, nn.Module] = {}

    @property
    def is_plain(self) -> bool:
        return self.stage is None

    def model(self, name: str = "model", *, seed: int = 1, shape: type[nn.Module] = Net, **options: Any) -> Any:
        """The model whose values are compared at the end; `options` go to the class."""
        torch.manual_seed(seed)
        model = shape(**options).to(self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.8)
        self.models[name] = self.shard(model)
        return self.models[name]

    def shard(self, model: nn.Module) -> nn.Module:
        if self.is_plain:
            return model
        return zeropg.fully_shard(model, stage=self.stage, param_dtype=self.param_dtype)

    def optimizer(self, model: nn.Module, parameters: Any = None, rate: float = RATE) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=rate, momentum=0.5)
        if self.is_plain:
            return optimizer
        return zeropg.shard_optimizer(optimizer, model, overlap_step=self.overlap_step)

    def batches(self, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens [n, 4] and targets [n, 3]: 12 rows, or this rank's part of them."""
        generator = torch.Generator().manual_seed(7)
        result = []
        for _ in range(steps):
            tokens = torch.randint(0, 11, (12, 4), generator=generator)
            targets = torch.randn(12, 3, generator=generator, dtype=torch.float64).to(self.dtype)
            result.append((self.mine(tokens), self.mine(targets)))
        return result

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.is_plain else tensor.chunk(dist.get_world_size())[dist.get_rank()]

    def whole(self, model: nn.Module, *, writable: bool = False) -> Any:
        return contextlib.nullcontext() if self.is_plain else zeropg.full_parameters(model, writable=writable)

    def whole_gradients(self, model: nn.Module) -> Any:
        return contextlib.nullcontext() if self.is_plain else zeropg.full_gradients(model)

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the plain process has as the mean over its batch."""
        if not self.is_plain:
            tensor = tensor.detach().clone()
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        return tensor

    def values(self) -> dict[str, torch.Tensor]:
        result = {}
        for name, model in self.models.items():
            state = model.state_dict() if self.is_plain else zeropg.full_state_dict(model, rank0_only=False)
            result.update({f"{name}.{key}": value.detach().clone() for key, value in state.items()})
        return result


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(tokens).to(targets.dtype) - targets).square().mean()


def train(run: Run, model: nn.Module, after_step: Callable[[], None] = lambda: None) -> None:
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


# --- parameters ---


def plain_training(run: Run) -> None:
    train(run, run.model())


def clamp_after_each_step(run: Run) -> None:
    model = run.model()

    @torch.no_grad()
    def clamp() -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)

    train(run, model, clamp)


def clamp_data_before_each_step(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        optimizer.step()
        optimizer.zero_grad()


def clamp_with_foreach(run: Run) -> None:
    model = run.model()
    train(run, model, lambda: torch._foreach_clamp_max_([p.detach() for p in model.parameters()], 0.1))


def clamp_inside_writable_full_parameters(run: Run) -> None:
    model = run.model()

    def clamp() -> None:
        with torch.no_grad(), run.whole(model, writable=True):
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    train(run, model, clamp)


def clamp_inside_full_parameters(run: Run) -> None:
    model = run.model()

    def clamp() -> None:
        with torch.no_grad(), run.whole(model):
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    train(run, model, clamp)


def assign_data(run: Run) -> None:
    model = run.model()

    def decay() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5

    train(run, model, decay)


def assign_data_of_another_dtype(run: Run) -> None:
    model = run.model()

    def decay() -> None:
        if run.is_plain:
            model.head.bias.data.zero_()
        else:
            model.head.bias.data = torch.zeros(3, dtype=torch.float16)

    train(run, model, decay)


def initialize_after_sharding(run: Run) -> None:
    model = run.model()
    nn.init.constant_(model.head.weight, 0.25)
    train(run, model)


def load_state_dict_of_a_submodule(run: Run) -> None:
    model = run.model()
    values = {"weight": torch.full((3, 6), 0.3, dtype=run.dtype), "bias": torch.ones(3, dtype=run.dtype)}
    train(run, model, lambda: model.head.load_state_dict(values))


def load_state_dict_of_a_unit(run: Run) -> None:
    model = run.model()
    values = {name: torch.full(p.shape, 0.3, dtype=run.dtype) for name, p in model.blocks[1].named_parameters()}
    train(run, model, lambda: model.blocks[1].load_state_dict(values))


def merge_into_a_frozen_weight(run: Run) -> None:
    """As PEFT's merge_adapter does."""
    model = run.model(shape=Adapted)
    train(run, model)
    with torch.no_grad():
        model.base.weight.data += model.b.weight.data @ model.a.weight.data
    train(run, model)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        self.a = nn.Linear(6, 2, bias=False)
        self.b = nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).mean(1)
        return self.head(torch.tanh(self.base(x) + self.b(self.a(x))))


def renormalized_table(run: Run) -> None:
    train(run, run.model(max_norm=0.7))


def renormalized_table_in_evaluation(run: Run) -> None:
    """The rows that ranks look up differ, and no backward follows."""
    model = run.model(max_norm=0.7)
    with torch.no_grad():
        for tokens, _ in run.batches(1):
            model(tokens)


def renormalized_table_assigned_before_forward(run: Run) -> None:
    """Each rank's forward renormalizes its own rows of a table that all ranks have just written."""
    model = run.model(max_norm=0.7)

    def grow() -> None:
        model.table.weight.data = model.table.weight.data * 1.5

    grow()
    train(run, model, grow)


def renormalized_table_written_before_forward(run: Run) -> None:
    model = run.model(max_norm=0.7)
    optimizer = run.optimizer(model)
    for batch in run.batches():
        with torch.no_grad(), run.whole(model, writable=True):
            model.table.weight.mul_(1.5)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def renormalized_table_written_in_place_before_forward(run: Run) -> None:
    model = run.model(max_norm=0.7)
    optimizer = run.optimizer(model)
    for batch in run.batches():
        model.table.weight.data.mul_(1.5)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def momentum_teacher(run: Run) -> None:
    student, teacher = run.model("student"), run.model("teacher", seed=2)

    @torch.no_grad()
    def follow() -> None:
        for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
            old.data.mul_(0.5).add_(new.data, alpha=0.5)

    train(run, student, follow)


def momentum_teacher_by_assignment(run: Run) -> None:
    student, teacher = run.model("student"), run.model("teacher", seed=2)

    def follow() -> None:
        for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
            old.data = old.data * 0.5 + new.data * 0.5

    train(run, student, follow)


def momentum_teacher_inside_full_parameters(run: Run) -> None:
    student, teacher = run.model("student"), run.model("teacher", seed=2)

    def follow() -> None:
        with torch.no_grad(), run.whole(student), run.whole(teacher, writable=True):
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.5)

    train(run, student, follow)


def momentum_teacher_on_shards(run: Run) -> None:
    student, teacher = run.model("student"), run.model("teacher", seed=2)

    @torch.no_grad()
    def follow() -> None:
        if run.is_plain:
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.5)
            return
        with zeropg.writable_shards(teacher) as shards:
            for (_, old, *_), (_, new, *_) in zip(shards, zeropg.local_shards(student), strict=True):
                old.lerp_(new, 0.5)

    train(run, student, follow)
    for tokens, _ in run.batches(1):
        teacher(tokens)


def step_inside_writable_shards(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        with contextlib.nullcontext() if run.is_plain else zeropg.writable_shards(model):
            optimizer.step()


def write_through_local_shards(run: Run) -> None:
    model = run.model()

    @torch.no_grad()
    def decay() -> None:
        if run.is_plain:
            for parameter in model.parameters():
                parameter.mul_(0.5)
            return
        for _, tensor, _, _ in zeropg.local_shards(model):
            tensor.mul_(0.5)

    train(run, model, decay)


def read_on_one_rank(run: Run) -> None:
    """What asks for a writable pointer and only reads, on rank 0 alone."""
    model = run.model()

    def read() -> None:
        if run.is_plain or dist.get_rank() == 0:
            for parameter in model.parameters():
                with contextlib.suppress(RuntimeError):  # stage 3 refuses it
                    parameter.detach().float().numpy().sum() if run.param_dtype else parameter.data_ptr()

    train(run, model, read)


def write_on_one_rank(run: Run) -> None:
    model = run.model()

    def write() -> None:
        if run.is_plain or run.stage == 3 or run.overlap_step or dist.get_rank() == 1:  # refused on every rank
            model.head.bias.data.fill_(1)

    train(run, model, write)


def write_differently_inside_full_parameters(run: Run) -> None:
    model = run.model()
    with torch.no_grad(), run.whole(model, writable=True):
        model.head.bias.fill_(0.0 if run.is_plain else float(dist.get_rank()))
    train(run, model)


def write_in_forward(run: Run) -> None:
    model = run.model()

    def clamp(module: Any, _: Any) -> None:
        module.scale.data.clamp_(-0.5, 0.5)

    model.blocks[1].register_forward_pre_hook(clamp)
    train(run, model)


def step_without_shard_optimizer(run: Run) -> None:
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware_steps(run: Run) -> None:
    """SAM: climb, a second forward and backward there, back, step."""
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        with torch.no_grad(), run.whole(model, writable=True), run.whole_gradients(model):
            before = [p.detach().clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=0.2)
        model.zero_grad()
        loss_of(model, *batch).backward()
        with torch.no_grad(), run.whole(model, writable=True):
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


# --- gradients ---


def two_losses_by_hand(run: Run) -> None:
    """Gradient surgery: the gradients of two losses are kept and combined."""
    model = run.model()
    optimizer = run.optimizer(model)
    for tokens, targets in run.batches():
        parts = []
        for target in (targets, -targets * 0.5):
            with run.whole_gradients(model):
                optimizer.zero_grad()
            loss_of(model, tokens, target).backward()
            with run.whole_gradients(model):
                parts.append([p.grad for p in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *parts, strict=True):
            parameter.grad = first + 0.5 * second
        optimizer.step()
        optimizer.zero_grad()


def keep_grad_over_zero_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    kept: list[torch.Tensor] | None = None
    for batch in run.batches():
        loss_of(model, *batch).backward()
        grads = [p.grad for p in model.parameters()]
        if kept is not None:
            for parameter, old in zip(model.parameters(), kept, strict=True):
                parameter.grad = parameter.grad + old
        kept = grads
        optimizer.step()
        optimizer.zero_grad()


def keep_a_view_of_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    kept = None
    for batch in run.batches():
        loss_of(model, *batch).backward()
        row = model.head.weight.grad[1]
        if kept is not None:
            model.head.weight.grad[1] += kept
        kept = row
        optimizer.step()
        optimizer.zero_grad()


def drop_one_and_keep_it(run: Run) -> None:
    model = run.model()
    first, second = run.batches(2)
    loss_of(model, *first).backward()
    kept = model.head.weight.grad
    model.head.weight.grad = None
    loss_of(model, *second).backward()
    model.head.weight.grad = model.head.weight.grad + 2 * kept
    optimizer = run.optimizer(model)
    optimizer.step()


def add_to_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad + torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def assign_grad_of_the_parameters_dtype(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for _ in run.batches():
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def assign_data_of_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        for parameter in model.parameters():
            parameter.grad.data = torch.ones_like(parameter.grad.data)
        optimizer.step()
        optimizer.zero_grad()


def assign_data_of_grad_and_go_on(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        for _ in range(2):
            loss_of(model, *batch).backward()
            model.head.bias.grad.data = torch.full((3,), 0.1, dtype=model.head.bias.grad.dtype)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def scale_grad_in_place(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(3)
        optimizer.step()
        optimizer.zero_grad()


def write_inside_full_gradients(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        with run.whole_gradients(model):
            for index, parameter in enumerate(model.parameters()):
                if index % 3 == 0:
                    parameter.grad.mul_(3)
                elif index % 3 == 1:
                    parameter.grad = parameter.grad + 0.3
            model.head.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()


def inside_full_gradients(run: Run, operation: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        with run.whole_gradients(model):
            for parameter in model.parameters():
                parameter.grad.mul_(3)
            operation(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def clip_inside_full_gradients(run: Run) -> None:
    clip = (
        nn.utils.clip_grad_norm_ if run.is_plain else lambda _, norm: zeropg.clip_grad_norm_(run.models["model"], norm)
    )
    inside_full_gradients(run, lambda model, _: clip(model.parameters(), 0.1))


def step_inside_full_gradients(run: Run) -> None:
    inside_full_gradients(run, lambda _, optimizer: optimizer.step())


def zero_inside_full_gradients(run: Run) -> None:
    inside_full_gradients(run, lambda _, optimizer: optimizer.zero_grad(set_to_none=False))


def full_gradients_twice(run: Run) -> None:
    def double(model: nn.Module, _: torch.optim.Optimizer) -> None:
        with run.whole_gradients(model):
            model.head.bias.grad.mul_(2)
        model.head.bias.grad.mul_(2)

    inside_full_gradients(run, double)


def zero_the_gradients_of_a_unit(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        model.blocks[1].zero_grad(set_to_none=False)  # so that its momentum goes on
        optimizer.step()
        model.blocks[2].zero_grad()
        model.zero_grad(set_to_none=False)


def penalty_on_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()


def penalty_on_input_gradient(run: Run) -> None:
    """As in WGAN-GP: autograd.grad with create_graph, then backward through it."""
    model = run.model()
    optimizer = run.optimizer(model)
    for tokens, _ in run.batches():
        x = torch.linspace(-1, 1, 72, dtype=run.dtype).view(12, 6)
        x = run.mine(x + tokens.new_zeros(()).to(run.dtype)).requires_grad_()
        out = model(x).to(run.dtype).tanh().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def grad_of_parameters_by_autograd_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, *batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = run.average(gradient)
        optimizer.step()
        optimizer.zero_grad()


def autograd_grad_on_one_rank(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        # Where units are gathered, forward and backward communicate.
        if run.is_plain or dist.get_rank() == 0 or model._zeropg.fetch_is_collective:
            torch.autograd.grad(loss_of(model, *batch), model.head.bias)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_backwards_through_one_graph(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss = loss_of(model, *batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_inside_backward(run: Run) -> None:
    model = run.model()
    optimizers = {p: torch.optim.SGD([p], lr=RATE) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in run.batches():
        loss_of(model, *batch).backward()


def sharded_optimizer_inside_backward(run: Run) -> None:
    model = run.model()
    optimizers = {p: run.optimizer(model, [p]) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in run.batches():
        loss_of(model, *batch).backward()


class Broken(Exception):
    """What a hook of `error_in_the_second_backward` raises."""


def error_in_the_second_backward(run: Run) -> None:
    """Accumulation over three backwards, of which the second raises and is skipped."""
    model = run.model()
    optimizer = run.optimizer(model)
    batches = run.batches(3)
    for index, batch in enumerate(batches):
        loss = loss_of(model, *batch)
        if index != 1:
            loss.backward()
            continue
        if run.is_plain:
            continue

        def fail(gradient: torch.Tensor) -> torch.Tensor:
            raise Broken

        handle = model.blocks[1].scale.register_hook(fail)
        with contextlib.suppress(Broken):
            loss.backward()
        handle.remove()
    optimizer.step()


def error_then_zero_grad(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    first, second, third = run.batches(3)
    loss_of(model, *first).backward()

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise Broken

    handle = model.blocks[1].scale.register_hook(fail)
    with contextlib.suppress(Broken):
        loss_of(model, *second).backward()
    handle.remove()
    optimizer.zero_grad()
    loss_of(model, *third).backward()
    optimizer.step()


# --- optimizer state ---


def edit_state(
    run: Run, edit: Callable[[torch.optim.Optimizer, nn.Parameter], None], kind: type[torch.optim.Optimizer]
) -> None:
    """Edits the state of two parameters in three between steps."""
    model = run.model()
    # With an eps that keeps the sign of a gradient near zero, which 16 bits may not have, from counting.
    plain = kind(model.parameters(), 0.05, **({"momentum": 0.5} if kind is torch.optim.SGD else {"eps": 0.1}))
    optimizer = plain if run.is_plain else zeropg.shard_optimizer(plain, model)
    for batch in run.batches(4):
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        for index, parameter in enumerate(model.parameters()):
            if index % 3 and optimizer.state.get(parameter):  # a rank that owns nothing of it has no state
                edit(optimizer, parameter)


def remove_state(run: Run) -> None:
    edit_state(run, lambda optimizer, parameter: optimizer.state.pop(parameter), torch.optim.SGD)


def empty_state(run: Run) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        edit_state(run, lambda optimizer, parameter: optimizer.state.update({parameter: {}}), kind)


def scale_state(run: Run) -> None:
    def scale(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        optimizer.state[parameter]["momentum_buffer"].mul_(0.3)

    edit_state(run, scale, torch.optim.SGD)


def replace_state(run: Run) -> None:
    def replace(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        state = optimizer.state[parameter]
        key = "exp_avg" if "exp_avg" in state else "square_avg"
        state[key] = state[key] * 0.3
        state["step"] = torch.tensor(5.0)

    for kind in (torch.optim.AdamW, torch.optim.RMSprop):
        edit_state(run, replace, kind)


def another_state_dictionary(run: Run) -> None:
    def forget_all(optimizer: torch.optim.Optimizer, _: nn.Parameter) -> None:
        optimizer.state = defaultdict(dict)

    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        edit_state(run, forget_all, kind)


# --- models that change ---


def freeze_and_unfreeze(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model)
    for index, batch in enumerate(run.batches(4)):
        model.blocks[1].requires_grad_(index % 2 == 0)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def unfreeze_what_was_frozen(run: Run) -> None:
    """Gradual unfreezing, with an optimizer that has had all parameters from the start."""
    model = run.model(shape=HalfFrozen)
    optimizer = run.optimizer(model, list(model.parameters()), rate=1.0)
    for index, batch in enumerate(run.batches(4)):
        if index == 2:
            model.net.blocks.requires_grad_(True)
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.blocks.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


def unfreeze_with_a_new_param_group(run: Run) -> None:
    model = run.model(shape=HalfFrozen)
    optimizer = run.optimizer(model, [p for p in model.parameters() if p.requires_grad], rate=1.0)
    for index, batch in enumerate(run.batches(4)):
        if index == 2:
            model.net.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.net.blocks[0].parameters())})
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def disable_an_adapter_without_gradients(run: Run) -> None:
    """As PEFT's disable_adapter around the reference forward of DPO: flags flip under no_grad and flip back."""
    model = run.model(shape=Adapted)
    optimizer = run.optimizer(model)
    for tokens, targets in run.batches():
        with torch.no_grad():
            model.a.requires_grad_(False)
            model.b.requires_grad_(False)
            reference = model(tokens).to(run.dtype)
            model.a.requires_grad_(True)
            model.b.requires_grad_(True)
        (model(tokens).to(run.dtype) - targets - 0.1 * reference).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def read_the_weight_in_a_forward_hook(run: Run) -> None:
    model = run.model()
    model.blocks[1].register_forward_hook(lambda module, _, out: out * module.linear.weight.sum())
    train(run, model)


def functional_call(run: Run) -> None:
    model = run.model()
    train(run, model)
    parameters = {
        name: torch.full(p.shape, 0.1, dtype=p.dtype, requires_grad=True) for name, p in model.named_parameters()
    }
    tokens, targets = run.batches(1)[0]
    out = torch.func.functional_call(model, parameters, (tokens,)).to(run.dtype)
    (out - targets).square().mean().backward()
    gradients = [run.average(value.grad) for value in parameters.values()]
    with torch.no_grad(), run.whole(model, writable=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient)


def traced_by_torch_jit(run: Run) -> None:
    """As tensorboard's add_graph does: the trace has the model's operations and none of ours."""
    model = run.model()
    tokens, _ = run.batches()[0]
    traced = torch.jit.trace(model, tokens, check_trace=False)
    train(run, model)
    with run.whole(model):
        assert torch.equal(traced(tokens), model(tokens))


def func_grad(run: Run) -> None:
    model = run.model()
    tokens, targets = run.batches(1)[0]
    parameters = {name: torch.full(p.shape, 0.1, dtype=p.dtype) for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return (torch.func.functional_call(model, values, (tokens,)).to(run.dtype) - targets).square().mean()

    gradients = torch.func.grad(loss)(parameters)
    with torch.no_grad(), run.whole(model, writable=True):
        for name, parameter in model.named_parameters():
            parameter.sub_(run.average(gradients[name]))


def a_block_twice_under_reentrant_checkpointing(run: Run) -> None:
    model = run.model()

    def wrap(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)

    model.wrap = wrap
    train(run, model)


def a_block_twice(run: Run) -> None:
    model = run.model()
    model.wrap = lambda block, x: block(block(x))
    train(run, model)


class InPlace(nn.Module):
    """A block that changes its input and whose output is changed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(0.5)
        return self.linear(torch.relu_(x))


class InPlaceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(InPlace(6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).mean(1) * 1.0
        for block in self.blocks:
            x = block(x)
            x.mul_(2)
        return self.head(x)


def operations_in_place_around_units(run: Run) -> None:
    train(run, run.model(shape=InPlaceNet))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.LSTM(6, 6, batch_first=True)])
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.layers[0](self.table(tokens))
        return self.head(x[:, -1])


def recurrent_layers(run: Run) -> None:
    train(run, run.model(shape=Recurrent))


def two_optimizers(run: Run) -> None:
    """As in a GAN with one model, steps alternate."""
    model = run.model()
    first = run.optimizer(model, list(model.blocks.parameters()))
    second = run.optimizer(model, [*model.table.parameters(), *model.head.parameters()], rate=0.05)
    for index, batch in enumerate(run.batches(4)):
        loss_of(model, *batch).backward()
        (first if index % 2 else second).step()
        model.zero_grad()


def replaced_parameter(run: Run) -> None:
    model = run.model()
    if not run.is_plain:
        model.head.bias = nn.Parameter(torch.zeros(3, dtype=run.dtype))
    train(run, model)


class Encoder(nn.Module):
    """A unit whose users call another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([EncodingBlock()])
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0].encode(self.table(tokens)))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].encode(self.table(tokens))


class EncodingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).mean(1)


def methods_other_than_forward(run: Run) -> None:
    model = run.model(shape=Encoder)
    if not run.is_plain:
        zeropg.register_forward_method(model, "encode")
        zeropg.register_forward_method(model.blocks[0], "encode")
    optimizer = run.optimizer(model)
    for tokens, targets in run.batches():
        loss_of(model, tokens, targets).backward()
        model.encode(tokens).to(run.dtype).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assign_data_between_forward_and_backward(run: Run) -> None:
    """The root is whole there in stage 3 too. What autograd has saved reads the new values, as in plain torch."""
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss = loss_of(model, *batch)
        model.head.bias.data = torch.full_like(model.head.bias.data, 0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def set_the_data_of_parameters(run: Run) -> None:
    """autograd makes a new accumulator for a parameter whose data was set, as torch's parametrizations do."""
    model = run.model()
    with torch.no_grad(), run.whole(model, writable=True):
        model.head.weight.set_(torch.full((3, 6), 0.2, dtype=model.head.weight.dtype))
        model.blocks[0].linear.weight.data = model.blocks[0].linear.weight.data.t()
    train(run, model)


def weights_under_a_parametrization(run: Run) -> None:
    model = run.model(shape=Parametrized)
    with torch.no_grad(), run.whole(model, writable=True):
        model.head.weight = torch.full((3, 6), 0.5, dtype=next(model.parameters()).dtype)
    train(run, model)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


def look_at_gradients_before_they_are_reduced(run: Run) -> None:
    model = run.model()
    batch = run.batches(1)[0]
    with contextlib.nullcontext() if run.is_plain else zeropg.no_sync(model):
        loss_of(model, *batch).backward()
    with run.whole_gradients(model):
        model.head.bias.grad.mul_(2)


# --- what modules take and return ---


class Pair(NamedTuple):
    value: torch.Tensor
    note: str


@dataclass
class Record:
    value: torch.Tensor


class Registered:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


register_pytree_node(Registered, lambda r: ([r.value], None), lambda values, _: Registered(*values))


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Carrying(nn.Module):
    """Takes and returns an object. The frozen layer's weight is read after the parameters' last gradient is there."""

    def __init__(self, width: int, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.linear = nn.Linear(width, width)
        self.wrap = wrap

    def forward(self, carrier: Any) -> Any:
        return self.wrap(torch.tanh(self.linear(self.frozen(carrier.value))))


class CarryingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        wraps = [lambda value: Pair(value, "kept"), Record, Registered, Opaque, Slotted, Opaque]
        self.blocks = nn.ModuleList(Carrying(6, wrap) for wrap in wraps)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        carrier: Any = Record(self.table(tokens).mean(1))
        for block in self.blocks:
            carrier = block(carrier)
        return self.head(carrier.value)


def units_that_pass_objects(run: Run) -> None:
    train(run, run.model(shape=CarryingNet))


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(x).max(dim=-1, keepdim=True)


class LargestNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), Largest()), Taking()])
        self.table = nn.Embedding(11, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.table(tokens).mean(1)))


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 3)

    def forward(self, largest: Any) -> torch.Tensor:
        return self.linear(largest.values)


def units_that_pass_what_torch_returns(run: Run) -> None:
    train(run, run.model(shape=LargestNet))


class Sequence(nn.Sequential):
    """Units that nobody named: repeated blocks of an nn.Sequential, and an operation in place behind one."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)]
        super().__init__(nn.EmbeddingBag(11, 6), *blocks, nn.ReLU(inplace=True), nn.Linear(6, 3))


def a_sequence_of_blocks(run: Run) -> None:
    train(run, run.model(shape=Sequence))


class Remembering(nn.Module):
    """Adds what it gets to a list of its caller, and sees whether two arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, again: torch.Tensor, memory: dict[str, Any]) -> torch.Tensor:
        memory["seen"].append(x)
        memory["count"] += 1
        return torch.tanh(self.linear(x)) * (2.0 if x is again else 1.0)


class RememberingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Remembering() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.table(batch["tokens"]).mean(1)
        memory: dict[str, Any] = {"seen": [x], "count": 0}
        for block in self.blocks:
            x = block(x, x, memory)
        batch["auxiliary"] = x.square().mean()
        return self.head(sum(memory["seen"]) * memory["count"] / 4)


def units_that_write_to_their_arguments(run: Run) -> None:
    """Lists and dictionaries of hidden states, a cache, an auxiliary loss: the caller finds what was written."""
    model = run.model(shape=RememberingNet)
    optimizer = run.optimizer(model)
    for tokens, targets in run.batches():
        batch = {"tokens": tokens, "scale": torch.ones((), dtype=torch.float64)}
        before = dict(batch)
        loss = (model(batch).to(targets.dtype) - targets).square().mean() + batch["auxiliary"].to(targets.dtype)
        assert all(batch[key] is value for key, value in before.items())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# --- data that changes hands ---


def swap_data_and_back(run: Run) -> None:
    """Evaluation with averaged weights, whose values come and go by assignment."""
    model = run.model()
    swap_by_data(run, model, lambda: contextlib.nullcontext())


def swap_data_inside_full_parameters(run: Run) -> None:
    model = run.model()
    swap_by_data(run, model, lambda: run.whole(model, writable=True))


def swap_by_data(run: Run, model: nn.Module, whole: Callable[[], Any]) -> None:
    tokens, _ = run.batches()[0]

    def evaluate() -> None:
        with torch.no_grad(), whole():
            backup = [parameter.data for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
            assert model(tokens).count_nonzero() == 0
            for parameter, data in zip(model.parameters(), backup, strict=True):
                parameter.data = data

    train(run, model, evaluate)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3)
        self.mix = nn.Linear(3, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mix(self.table(tokens).mean(1))


def transpose_grad_in_place(run: Run) -> None:
    model = run.model(shape=Squares)
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        model.mix.weight.grad.t_()
        optimizer.step()
        optimizer.zero_grad()


def append_to_a_param_group(run: Run) -> None:
    model = run.model()
    optimizer = run.optimizer(model, list(model.head.parameters()))
    for index, batch in enumerate(run.batches(4)):
        if index == 1:
            optimizer.param_groups[0]["params"] += list(model.blocks.parameters())
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()


class Converting(nn.Linear):
    """Loads what an older version has saved: other values, and a key that it leaves alone."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        converted = {key: 3 * value for key, value in state_dict.items() if key != prefix + "bias"}
        converted[prefix + "bias"] = self.bias.detach().clone()
        super()._load_from_state_dict(converted, prefix, *rest)


class ConvertingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = Converting(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


def loading_code_of_a_module(run: Run) -> None:
    model = run.model(shape=ConvertingNet)
    old = torch.Generator().manual_seed(5)
    values = {name: torch.randn(tensor.shape, generator=old) for name, tensor in model.state_dict().items()}
    model.load_state_dict(values)
    train(run, model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(self.table(tokens).mean(1)))))


def two_values_for_tied_weights(run: Run) -> None:
    model = run.model(shape=Tied)
    model.load_state_dict(
        {"first.weight": torch.full((6, 6), 0.1), "second.weight": torch.full((6, 6), 0.3)}, strict=False
    )
    train(run, model)


def save_after_modules_changed_places(run: Run) -> None:
    model = run.model()
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def parameters_over_one_storage(run: Run) -> None:
    model = Net()
    model.blocks[1].linear.weight = nn.Parameter(model.blocks[0].linear.weight.data)
    run.shard(model)


def a_buffer_over_a_parameter(run: Run) -> None:
    model = Net()
    model.register_buffer("lower_rows", model.head.weight.data[1:])
    run.shard(model)


def columns_of_one_tensor(run: Run) -> None:
    """They lie between each other, but share no element."""
    model = run.model(shape=Columns)
    train(run, model)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(11, 6)
        self.left = nn.Parameter(both[:, :3])
        self.right = nn.Parameter(both[:, 3:])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.left).mean(1) * nn.functional.embedding(tokens, self.right).mean(1)


# --- calls in the middle of a backward ---


def read_all_in_a_backward_hook(run: Run) -> None:
    model = run.model()

    def read(gradient: torch.Tensor) -> None:
        with run.whole(model):
            model.head.weight.sum()

    model.blocks[1].linear.register_forward_hook(lambda module, inputs, output: output.register_hook(read) and None)
    train(run, model)


def save_in_a_backward_hook(run: Run) -> None:
    model = run.model()

    def save(gradient: torch.Tensor) -> None:
        if not run.is_plain:
            zeropg.full_state_dict(model)

    model.blocks[1].linear.register_forward_hook(lambda module, inputs, output: output.register_hook(save) and None)
    train(run, model)


# --- forwards inside forwards ---


class SelfConditioned(Net):
    """Looks at its own answer first, as diffusion models do."""

    def forward(self, tokens: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        if before is None:
            with torch.no_grad():
                before = self(tokens, torch.zeros((), dtype=self.head.weight.dtype))
        return super().forward(tokens) + 0.1 * before


def model_that_calls_itself(run: Run) -> None:
    train(run, run.model(shape=SelfConditioned))


class Recursive(Block):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        if depth > 0:
            x = x + self(x, depth - 1)
        return x * self.scale


class OfRecursive(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recursive(6) for _ in range(2))


def unit_that_calls_itself(run: Run) -> None:
    train(run, run.model(shape=OfRecursive))


class Forces(Net):
    """The gradient of an energy, and a head on it: `create_graph` in training alone, as such models have it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = self.embed(tokens).detach().requires_grad_()
            energy = x
            for block in self.blocks:
                energy = block(energy)
            (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=self.training)
        return self.head(force)


def forces_in_training_and_evaluation(run: Run) -> None:
    model = run.model(shape=Forces)
    train(run, model)
    model.eval()
    shift = run.average(model(run.batches(1)[0][0]).mean())
    with torch.no_grad():
        shift = shift + run.average(model(run.batches(1)[0][0]).mean())
    model.train()
    with run.whole(model, writable=True), torch.no_grad():
        model.head.bias.add_(shift.to(model.head.bias.dtype))
    train(run, model)


class OfInnerGradient(Net):
    """An inner gradient, without a graph, in the forward that is trained."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.head(self.blocks[0](inner)).sum(), inner)
        for block in self.blocks:
            x = block(x - 0.1 * gradient)
        return self.head(x)


def inner_gradient_in_the_forward(run: Run) -> None:
    train(run, run.model(shape=OfInnerGradient))


class WithParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens), self.temperature


def return_a_parameter(run: Run) -> None:
    model = run.model(shape=WithParameter)
    optimizer = run.optimizer(model)
    for tokens, targets in run.batches():
        outputs, temperature = model(tokens)
        (outputs * temperature - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
