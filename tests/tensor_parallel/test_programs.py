"""What programs do with parameters that are DTensors: gradients, writes, dtypes, overflow, errors in the middle."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zeropg
from tests.sharding.ranks import close, equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.tensor_parallel.model import make_mesh, make_sharded, parallelize, step, train_alone, whole_parameters


def own_part(mesh: Any, batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def plain_gradients(*batches: torch.Tensor) -> dict[str, torch.Tensor]:
    model = make_model(torch.float64)
    for batch in batches:
        loss_of(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on_ranks(4)
def test_gradients_are_dtensors_too() -> None:
    mesh, (first, second, *_) = make_mesh(2, 2), make_batches()
    expected, sum_of_two = plain_gradients(first), plain_gradients(first, second)
    for stage in (0, 1, 2, 3):
        model = make_sharded(mesh, stage=stage)
        parameters = dict(model.named_parameters())
        loss_of(model, own_part(mesh, first)).backward()
        up = parameters["blocks.0.up.weight"]
        assert isinstance(up, DTensor) and isinstance(up.grad, DTensor) and up.grad.placements == up.placements
        if stage >= 2:
            with raises(RuntimeError, "the gradient of 'blocks.0.up.weight' is sharded", "full_gradients"):
                up.grad.full_tensor()
        for batches_so_far in (expected, sum_of_two):
            with zeropg.full_gradients(model):
                for name, p in parameters.items():
                    gradient = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
                    assert close(gradient, batches_so_far[name], 1e-12), (stage, name)
            if batches_so_far is expected:
                loss_of(model, own_part(mesh, second)).backward()
        # What a program puts there, or takes away, counts.
        with zeropg.full_gradients(model):
            up.grad.mul_(3)
            parameters["blocks.0.down.weight"].grad = None
        with zeropg.full_gradients(model):
            assert close(up.grad.full_tensor(), 3 * sum_of_two["blocks.0.up.weight"], 1e-12)
        if stage < 2:
            up.grad = distribute_tensor(torch.ones_like(sum_of_two["blocks.0.up.weight"]), mesh["tp"], up.placements)
            zeropg.clip_grad_norm_(model, float("inf"))
            assert equal(up.grad.full_tensor(), torch.ones_like(sum_of_two["blocks.0.up.weight"]))
        model.zero_grad()
        assert all(p.grad is None for p in parameters.values())


@on_ranks(4)
def test_accumulation_hooks_and_gradients_that_stay() -> None:
    mesh, (first, second, *_) = make_mesh(2, 2), make_batches()
    expected = plain_gradients(first, second)
    for stage in (1, 3):
        model = make_sharded(mesh, stage=stage)
        up = model.blocks[0].up.weight
        seen: list[Any] = []
        up.register_hook(lambda gradient, seen=seen: seen.append(("local", type(gradient))))
        up.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(("reduced", type(p.grad))))
        with zeropg.no_sync(model):
            loss_of(model, own_part(mesh, first)).backward()
        loss_of(model, own_part(mesh, second)).backward()
        assert [kind for _, kind in seen] == [DTensor] * len(seen) and ("reduced", DTensor) in seen
        with zeropg.full_gradients(model):
            assert close(up.grad.full_tensor(), expected["blocks.0.up.weight"], 1e-12)
        model.zero_grad(set_to_none=False)
        with zeropg.full_gradients(model):
            assert up.grad.full_tensor().count_nonzero() == 0


@on_ranks(4)
def test_what_programs_write_counts() -> None:
    mesh = make_mesh(2, 2)
    for stage in (1, 3):
        model = make_sharded(mesh, stage=stage)
        before = whole_parameters(model)
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.blocks[1].down.weight.mul_(2)
            model.embedding.weight.to_local().add_(1)
        if stage < 3:
            with torch.no_grad():
                model.blocks[0].up.bias.fill_(5)
        optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        step(model, optimizer, make_batches()[0], mesh)  # its masters are what was written
        after = whole_parameters(model)
        assert equal(after["blocks.1.down.weight"], 2 * before["blocks.1.down.weight"])
        assert equal(after["embedding.weight"], before["embedding.weight"] + 1)
        assert stage == 3 or (after["blocks.0.up.bias"] == 5).all()


@on_ranks(4)
def test_a_conflict_in_one_part_is_an_error_on_every_rank(tmp_path: Path) -> None:
    mesh = make_mesh(2, 2)
    model = make_sharded(mesh, stage=1)
    with torch.no_grad():
        local = model.blocks[0].up.weight.to_local()
        local[0, 0] = dist.get_rank() if mesh["tp"].get_local_rank() == 1 else 7
    with raises(RuntimeError, "different values", "blocks.0.up.weight"):
        zeropg.save_checkpoint(tmp_path, model)


@on_ranks(4)
def test_sixteen_bits() -> None:
    mesh = make_mesh(2, 2)
    losses = []
    for stage in (0, 1, 2, 3):
        model = make_sharded(mesh, torch.float32, stage=stage, param_dtype=torch.bfloat16)
        up = model.blocks[0].up.weight
        assert up.dtype == torch.bfloat16 and up.requires_grad and isinstance(up, DTensor)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        losses.append([step(model, optimizer, batch, mesh) for batch in make_batches()[:3]])
        assert up.to_local().dtype == torch.bfloat16 if stage < 3 else True
        with zeropg.full_parameters(model):
            assert up.full_tensor().dtype == torch.bfloat16
        assert all(group.master_dtype == torch.float32 for group in model._zeropg.flat_groups)
    assert all(other == losses[0] for other in losses[1:])


@on_ranks(4)
def test_an_overflow_of_one_part_skips_the_step_everywhere() -> None:
    mesh = make_mesh(2, 2)
    for stage in (1, 3):
        model = make_sharded(mesh, torch.float32, stage=stage)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        scaler = zeropg.GradScaler(init_scale=4.0)
        before = whole_parameters(model)
        loss = loss_of(model, own_part(mesh, make_batches()[0]))
        scaler.scale(loss).backward()
        with zeropg.full_gradients(model):
            if mesh["tp"].get_local_rank() == 1:
                model.blocks[0].up.weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        after = whole_parameters(model)
        assert all(equal(after[name], before[name]) for name in before)


@on_ranks(4)
def test_an_error_in_the_middle_and_frozen_parameters() -> None:
    mesh = make_mesh(2, 2)
    model = parallelize(make_model(torch.float64), mesh["tp"])
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    zeropg.fully_shard(model, mesh=mesh["dp"])
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    before = whole_parameters(model)

    def fail(*_: Any) -> None:
        raise ArithmeticError("a bad sample")

    hook = model.blocks[1].register_forward_hook(fail)
    with raises(ArithmeticError, "a bad sample"):
        loss_of(model, own_part(mesh, make_batches()[0]))
    hook.remove()
    output = model(own_part(mesh, make_batches()[0])[:, :-1])
    output.register_hook(fail)
    with raises(ArithmeticError, "a bad sample"):
        output.sum().backward()
    step(model, optimizer, make_batches()[0], mesh)
    after = whole_parameters(model)
    assert equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
    assert not equal(after["blocks.0.down.weight"], before["blocks.0.down.weight"])
    # Unfrozen later, it trains.
    for block in model.blocks:
        block.up.weight.requires_grad_(True)
    step(model, optimizer, make_batches()[1], mesh)
    assert not equal(whole_parameters(model)["blocks.0.up.weight"], before["blocks.0.up.weight"])


@on_ranks(4)
def test_parameters_of_a_mesh_of_two_dimensions() -> None:
    """Cut along both dimensions, along one and replicated over the other, and over one of them alone."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "row", "column"))
    plain = nn.ParameterList(nn.Parameter(torch.randn(6, 5, dtype=torch.float64)) for _ in range(4))
    both = mesh["row", "column"]
    model = nn.Module()
    model.a = nn.Parameter(distribute_tensor(plain[0].detach(), both, [Shard(0), Shard(1)]))
    model.b = nn.Parameter(distribute_tensor(plain[1].detach(), both, [Shard(0), Shard(0)]))
    model.c = nn.Parameter(distribute_tensor(plain[2].detach(), both, [Replicate(), Shard(1)]))
    model.d = nn.Parameter(distribute_tensor(plain[3].detach(), mesh["column"], [Shard(0)]))
    model.forward = lambda: sum((p.full_tensor() ** 3).sum() for p in (model.a, model.b, model.c, model.d))
    zeropg.fully_shard(model, mesh=mesh["dp"])
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        model().backward()
        sum((p**3).sum() for p in plain).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 2.0)
        assert close(zeropg.clip_grad_norm_(model, 2.0), norm, 1e-14)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    for name, truth in zip("abcd", plain, strict=True):
        assert close(whole_parameters(model)[name], truth.detach(), 1e-13), name


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def make() -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 1))
        plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        return parallelize_module(model, mesh["tp"], plan)

    with raises(ValueError, "'0.weight' is a DTensor (shard(0) over tp 2)", "some of the same ranks", "mesh['dp']"):
        zeropg.fully_shard(make())
    model = zeropg.fully_shard(make(), mesh=mesh["dp"])
    with raises(NotImplementedError, "Adafactor needs '0.weight' whole", "shard(0) over tp 2", "AdamW"):
        zeropg.shard_optimizer(zeropg.optim.Adafactor(model.parameters()), model)
    zeropg.shard_optimizer(zeropg.optim.Adafactor(model[2].parameters()), model)
    with raises(NotImplementedError, "compression is 'auto'", "other codecs", "BlockQuant"):
        zeropg.fully_shard(make(), mesh=mesh["dp"], compression="auto")
    with raises(NotImplementedError, "is placed as"):
        partial = make()
        weight = DTensor.from_local(torch.ones(4, 3), mesh["tp"], [torch.distributed.tensor.Partial()])
        partial[0].weight = nn.Parameter(weight)
        zeropg.fully_shard(partial, mesh=mesh["dp"])
    others = make()
    zeropg.fully_shard(others, mesh=mesh["dp"], ignored_params=others[:2].parameters())
    others(torch.ones(2, 3)).sum().backward()
    assert dist.get_world_size() == 2


class SequenceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class SequenceModel(nn.Module):
    """Of which the blocks pass parts of the sequence to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(SequenceBlock() for _ in range(3))
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize_sequence(model: Any, mesh: Any) -> Any:
    plan: Any = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.norm": SequenceParallel(),
            f"blocks.{index}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{index}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model, mesh, plan)


@on_ranks(4)
def test_sequence_parallelism() -> None:
    mesh = make_mesh(2, 2)
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(10, (3, 4, 6), generator=generator)

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    for stage in (1, 3):
        torch.manual_seed(0)
        plain = SequenceModel().double()
        model = zeropg.fully_shard(parallelize_sequence(copy.deepcopy(plain), mesh["tp"]), mesh=mesh["dp"], stage=stage)
        optimizer = zeropg.shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), model)
        reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
        for tokens in batches:
            loss(model, own_part(mesh, tokens)).backward()
            loss(plain, tokens).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert close(zeropg.clip_grad_norm_(model, 0.5), norm, 1e-12)
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        trained = whole_parameters(model)
        assert all(close(trained[name], p.detach(), 1e-11) for name, p in plain.named_parameters()), stage


@on_ranks(4)
def test_a_model_on_meta_gets_other_numbers_for_each_part() -> None:
    mesh = make_mesh(2, 2)
    with torch.device("meta"):
        model = parallelize_sequence(SequenceModel(), mesh["tp"])
    zeropg.fully_shard(model, mesh=mesh["dp"], device="cpu")
    values = whole_parameters(model)
    up = values["blocks.0.up.weight"]
    assert not equal(*up.chunk(2)) and up.std() > 0.05
    for value in values.values():
        first = value.clone()
        dist.broadcast(first, 0)
        assert equal(first, value)
    drawn = torch.rand(1)
    first = drawn.clone()
    dist.broadcast(first, 0)
    assert equal(first, drawn), "ranks draw alike afterwards"
    assert values.keys() == dict(model.named_parameters()).keys()


@on_ranks(4)
def test_what_was_made_and_stepped_before() -> None:
    mesh, (first, second, *_) = make_mesh(2, 2), make_batches()
    plain, model = make_model(torch.float64), parallelize(make_model(torch.float64), mesh["tp"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        loss_of(each, first).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [id(p) for p in model.parameters()]
    for block in model.blocks:
        zeropg.fully_shard(block, mesh=mesh["dp"])  # becomes a unit of the model
    zeropg.fully_shard(model, mesh=mesh["dp"])
    assert [id(p) for p in model.parameters()] == before
    step(model, zeropg.shard_optimizer(optimizers[1], model), second, mesh)
    loss_of(plain, second).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizers[0].step()
    after = whole_parameters(model)
    assert all(close(after[name], p.detach(), 1e-11) for name, p in plain.named_parameters())


@on_ranks(4)
def test_activation_checkpoints() -> None:
    mesh = make_mesh(2, 2)
    for stage in (1, 3):
        runs = []
        for reentrant in (None, False, True):
            model = make_sharded(mesh, stage=stage)
            for block in model.blocks if reentrant is not None else ():
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
            optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
            runs.append([step(model, optimizer, batch, mesh) for batch in make_batches()[:2]])
        assert runs[0] == runs[1] == runs[2], stage


@on_ranks(8)
def test_replicas_of_shards_of_parts() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    place = 2 * mesh["replicate"].get_local_rank() + mesh["shard"].get_local_rank()
    _, parameters, norms = train_alone(torch.float64, steps=3)
    for stage in (2, 3):
        model = parallelize(make_model(torch.float64), mesh["tp"])
        zeropg.fully_shard(model, mesh=mesh["replicate", "shard"], stage=stage)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        for batch, norm in zip(make_batches(), norms, strict=False):
            loss_of(model, batch.chunk(4)[place]).backward()
            assert abs(zeropg.clip_grad_norm_(model, 1.0) / norm - 1) < 1e-12
            optimizer.step()
            optimizer.zero_grad()
        trained = whole_parameters(model)
        assert all(close(trained[name], value, 1e-11) for name, value in parameters.items()), stage
