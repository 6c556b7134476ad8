"""Recipes that write parameters or combine gradients between steps, as users write them for a sharded model: SAM, MoCo,
GAN, averaged weights, gradient surgery, DPO. Each equals the same recipe in a plain process, in every stage."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeropg
from tests.sharding.ranks import STAGES, on_ranks, raises
from tests.sharding.uses.programs import Net, Run, loss_of
from tests.sharding.uses.test_uses import FP64, outcome

DECAY = 0.6


def sharpness_aware_minimization(run: Run) -> None:
    """SAM: climb, a second forward and backward there, back, step."""
    model = run.model()
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        with torch.no_grad(), run.whole(model, writable=True), run.whole_gradients(model):
            norm = get_total_norm([p.grad for p in model.parameters()])
            climbs = [0.3 * p.grad / norm for p in model.parameters()]
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.add_(climb)
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        with torch.no_grad(), run.whole(model, writable=True):
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()


def momentum_contrast(run: Run) -> None:
    """MoCo: keys of an encoder that follows the trained one, against a queue of earlier keys of all ranks."""
    encoder, follower = run.model("encoder"), run.model("follower", seed=1)
    optimizer = run.optimizer(encoder)
    queue = F.normalize(torch.linspace(-1, 1, 60, dtype=run.dtype).view(20, 3).sin(), dim=1)
    for tokens, _ in run.batches():
        queries = F.normalize(encoder(tokens), dim=1)
        with torch.no_grad():
            with run.whole(encoder), run.whole(follower, writable=True):
                for old, new in zip(follower.parameters(), encoder.parameters(), strict=True):
                    old.lerp_(new, 1 - DECAY)
            keys = F.normalize(follower((tokens + 1) % 11), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / 0.2
        F.cross_entropy(logits, torch.zeros(len(tokens), dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
        queue = torch.cat([all_gather(run, keys), queue])[:20]


def all_gather(run: Run, rows: torch.Tensor) -> torch.Tensor:
    if run.is_plain:
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](torch.relu(self.blocks[0](x)))


def adversarial_networks(run: Run) -> None:
    """A GAN whose two models step in turns; the generator's backward also leaves gradients in the discriminator."""
    generator, discriminator = run.model("generator"), run.model("discriminator", shape=Discriminator)
    of_generator, of_discriminator = run.optimizer(generator), run.optimizer(discriminator)
    for tokens, real in run.batches(4):
        fake = generator(tokens)
        of_discriminator.zero_grad()
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(fake.detach())).mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        of_generator.step()


def averaged_weights(run: Run) -> None:
    """What torch.optim.swa_utils.AveragedModel does; evaluated, and copied into a second model."""
    model = run.model()
    optimizer = run.optimizer(model)
    average: Any = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if run.is_plain else zeropg.ema(model, DECAY)
    )
    for batch in run.batches(4):
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model) if run.is_plain else average.update()
        with torch.no_grad(), contextlib.nullcontext() if run.is_plain else average.average_parameters():
            loss = run.average(loss_of(average.module if run.is_plain else model, *batch))
        for group in optimizer.param_groups:  # so that what is evaluated counts
            group["lr"] = loss.item() / 10
    copy = run.model("copy", seed=2)
    copy.load_state_dict(
        average.module.state_dict() if run.is_plain else average.state_dict(rank0_only=False)["parameters"]
    )


def gradient_surgery(run: Run) -> None:
    """PCGrad: of two losses whose gradients conflict, each gives up what hurts the other."""
    model = run.model()
    optimizer = run.optimizer(model)
    conflicts = 0
    for tokens, targets in run.batches():
        gradients = []
        for target in (targets, -targets):
            optimizer.zero_grad()
            loss_of(model, tokens, target).backward()
            with run.whole_gradients(model):
                gradients.append(parameters_to_vector([p.grad for p in model.parameters()]))
        merged = torch.zeros_like(gradients[0])
        for gradient, other in (gradients, gradients[::-1]):
            merged += gradient - (gradient @ other).clamp(max=0) / (other @ other) * other
        conflicts += int(gradients[0] @ gradients[1] < 0)
        for parameter, part in zip(
            model.parameters(), merged.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view(parameter.shape)
        optimizer.step()
    assert conflicts > 0


class LowRank(nn.Module):
    """A frozen layer with a trained adapter, as PEFT makes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Linear(width, 2, bias=False)
        self.b = nn.Linear(2, width, bias=False)
        self.is_enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + (self.b(self.a(x)) if self.is_enabled else 0))


class Policy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(LowRank(6) for _ in range(3))

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """As PEFT's, which also flips requires_grad."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, is_enabled: bool) -> None:
        for block in self.blocks:
            block.is_enabled = is_enabled
            block.a.requires_grad_(is_enabled)
            block.b.requires_grad_(is_enabled)


def preference_optimization(run: Run) -> None:
    """DPO: the frozen reference is the policy without its adapter."""
    model = run.model(shape=Policy)
    optimizer = run.optimizer(model, [p for p in model.parameters() if p.requires_grad])
    for tokens, _ in run.batches():
        chosen, rejected = tokens[:, 0] % 3, (tokens[:, 0] + 1) % 3

        def margin(tokens: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
            scores = model(tokens).log_softmax(1)
            return (scores.gather(1, chosen[:, None]) - scores.gather(1, rejected[:, None])).squeeze(1)

        with torch.no_grad(), model.disable_adapter():
            reference = margin(tokens, chosen, rejected)
        policy = margin(tokens, chosen, rejected)
        F.logsigmoid(2 * (policy - reference)).mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


RECIPES: tuple[Callable[[Run], None], ...] = (
    sharpness_aware_minimization,
    momentum_contrast,
    adversarial_networks,
    averaged_weights,
    gradient_surgery,
    preference_optimization,
)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (3, "zeropg"),
        (2, "gloo"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, "zeropg"), (3, "gloo"))),
    ],
)
def test_recipes_equal_the_plain_process(rank_pool: Any, backend: str, world_size: int) -> None:
    for found in rank_pool(world_size, backend).run(outcomes, timeout=120):
        assert all(value == "equal" for value in found.values()), found


def outcomes() -> dict[tuple[str, int], str]:
    torch.set_num_threads(1)
    return {(recipe.__name__, stage): outcome(recipe, stage, FP64) for recipe in RECIPES for stage in STAGES}


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks()
def test_averages_leave_the_weights_as_they_are_and_load_into_another_stage(param_dtype: torch.dtype | None) -> None:
    averages = None
    for stage in STAGES:
        run = Run(stage, torch.float32, param_dtype)
        model = run.model()
        with torch.inference_mode():
            average = zeropg.ema(model, 0.5)
        optimizer = run.optimizer(model)
        for batch in run.batches():
            loss_of(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        before = zeropg.full_state_dict(model, rank0_only=False)
        with contextlib.suppress(KeyError), torch.inference_mode(), average.average_parameters():
            inside = zeropg.full_state_dict(model, rank0_only=False)
            raise KeyError
        found = average.state_dict(rank0_only=False)
        after = zeropg.full_state_dict(model, rank0_only=False)
        for name, value in found["parameters"].items():
            assert torch.equal(after[name], before[name])
            assert torch.equal(inside[name], value)
            assert not torch.equal(before[name], value)
            assert value.dtype == torch.float32
            assert averages is None or torch.equal(averages["parameters"][name], value)
        averages = averages or found
        fresh = zeropg.ema(run.model(seed=3), 0.5)
        fresh.load_state_dict(averages)
        loaded = fresh.state_dict(rank0_only=False)
        assert loaded["updates"] == 3
        assert all(torch.equal(loaded["parameters"][name], value) for name, value in found["parameters"].items())
        average.update()  # also after an evaluation in inference mode


def save_averages(folder: Path) -> dict[str, torch.Tensor]:
    run = Run(3, torch.float32)
    model = run.model()
    average = zeropg.ema(model, DECAY)
    optimizer = run.optimizer(model)
    for batch in run.batches():
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    zeropg.save_checkpoint(folder, model, optimizer, extra={"average": average.state_dict()})
    found: dict[str, torch.Tensor] = average.state_dict(rank0_only=False)["parameters"]
    return found


def load_averages(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    run = Run(stage, torch.float32)
    model = run.model(seed=3)
    average = zeropg.ema(model, DECAY)
    optimizer = run.optimizer(model)
    extra, _ = zeropg.load_checkpoint(folder, model, optimizer)
    average.load_state_dict(extra["average"])
    found: dict[str, torch.Tensor] = average.state_dict(rank0_only=False)["parameters"]
    return found


def test_averages_are_saved_with_a_checkpoint_for_any_world_size(rank_pool: Any, tmp_path: Path) -> None:
    expected = rank_pool(2).run(save_averages, tmp_path)[0]
    for world_size, stage in ((1, 0), (3, 2), (3, 3)):
        for found in rank_pool(world_size).run(load_averages, tmp_path, stage):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


@on_ranks()
def test_averages_hold_ignored_parameters_too() -> None:
    for stage in STAGES:
        plain, model = _twins(stage)
        reference = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        average = zeropg.ema(model, DECAY)
        steps = (
            torch.optim.SGD(plain.parameters(), 0.1),
            zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), 0.1), model),
        )
        for tokens in torch.arange(36).view(3, 3, 4) % 11:  # the same on all ranks: nobody reduces ignored gradients
            for each, optimizer in zip((plain, model), steps, strict=True):
                each(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            reference.update_parameters(plain)
            average.update()
        own = model.head.weight.detach().clone()
        with average.average_parameters():
            assert not torch.equal(model.head.weight, own)
        assert torch.equal(model.head.weight, own)
        found = average.state_dict(rank0_only=False)
        for name, value in reference.module.named_parameters():
            torch.testing.assert_close(found["parameters"][name], value.detach(), rtol=1e-12, atol=1e-12)
        fresh = zeropg.ema(model, DECAY)
        fresh.load_state_dict(found)
        with fresh.average_parameters():
            assert torch.equal(model.head.weight, found["parameters"]["head.weight"])


def _twins(stage: int) -> tuple[Net, Any]:
    torch.manual_seed(1)
    plain = Net().double()
    model = copy.deepcopy(plain)
    return plain, zeropg.fully_shard(model, stage=stage, ignored_params=list(model.head.parameters()))


@on_ranks()
def test_a_swap_that_fails_on_one_rank_leaves_weights_and_averages_as_they_were() -> None:
    for stage in STAGES:
        model = Run(stage, torch.float32).model()
        average = zeropg.ema(model)
        with zeropg.writable_shards(model) as shards, torch.no_grad():
            for _, tensor, *_ in shards:
                tensor.mul_(2)
        weights = zeropg.full_state_dict(model, rank0_only=False)
        averages = [tensor.clone() for tensor in average._averages]
        for is_entered in (False, True):
            with raises(RuntimeError, "ema", "rank 1"), contextlib.ExitStack() as stack:
                if is_entered:
                    stack.enter_context(average.average_parameters())
                right = average._averages[-1]
                if dist.get_rank() == 1:
                    average._averages[-1] = torch.zeros(right.numel() + 1)
                if not is_entered:
                    stack.enter_context(average.average_parameters())
            average._averages[-1] = right
            if is_entered:  # the model has the averages still
                with raises(RuntimeError, "inside average_parameters"):
                    average.update()
                average._swap()
            found = zeropg.full_state_dict(model, rank0_only=False)
            assert all(torch.equal(found[name], value) for name, value in weights.items())
            assert all(torch.equal(a, b) for a, b in zip(average._averages, averages, strict=True))


@on_ranks()
def test_averages_refuse_what_would_mix_them_with_the_weights() -> None:
    run = Run(3, torch.float32)
    model = run.model()
    optimizer = run.optimizer(model)
    average, other = zeropg.ema(model), zeropg.ema(model)
    with average.average_parameters():
        with raises(RuntimeError, "ema.update", "inside average_parameters"):
            other.update()
        with raises(RuntimeError, "ema.average_parameters", "inside average_parameters"), other.average_parameters():
            pass
        with raises(RuntimeError, "ema:", "inside average_parameters"):
            zeropg.ema(model)
        with raises(RuntimeError, "step", "inside average_parameters"):
            optimizer.step()
        with raises(RuntimeError, "load_checkpoint", "inside average_parameters"):
            zeropg.load_checkpoint("nowhere", model)
        with raises(RuntimeError, "ema.update", "inside average_parameters"):
            average.update()
        with raises(RuntimeError, "ema.state_dict", "inside average_parameters"):
            average.state_dict()
    state = average.state_dict(rank0_only=False)
    del state["parameters"]["head.bias"]
    with raises(ValueError, "[zeropg] ema.load_state_dict", "'head.bias'"):
        average.load_state_dict(state)
    state["parameters"]["head.bias"] = torch.zeros(2)
    with raises(ValueError, "[zeropg] ema.load_state_dict", "'head.bias' has shape [2], expected [3]"):
        average.load_state_dict(state)
    with raises(ValueError, "[zeropg] ema: decay is 2"):
        zeropg.ema(model, 2)
    with raises(ValueError, "[zeropg] ema: this Net is not a sharded model"):
        zeropg.ema(Net())
