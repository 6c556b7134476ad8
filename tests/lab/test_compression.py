"""Compressed reductions between hosts: what crosses the cables, and that all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import RankPool
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]
NUMEL = 4 << 20  # 16 MiB in fp32


def reduce(operation: str, codec: Any) -> float:
    """Returns the largest difference from the exact result, in units of the data's spread."""
    from zeropg._native import _C

    world_size, rank = dist.get_world_size(), dist.get_rank()
    numel = NUMEL if operation == "all_reduce" else NUMEL // world_size
    everybodys = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    exact = torch.stack(everybodys).mean(0)
    mine = everybodys[rank].clone()
    output = mine if operation == "all_reduce" else torch.empty(numel)
    dist.barrier()
    if codec is None:
        if operation == "all_reduce":
            dist.all_reduce(mine, dist.ReduceOp.AVG)
        else:
            dist.reduce_scatter_tensor(output, mine, dist.ReduceOp.AVG)
    else:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        last = (codec.make_compressor(), codec.make_residuals(), [("gradient", 0, NUMEL)], dist.ReduceOp.AVG, False)
        if operation == "all_reduce":
            _C.compressed_all_reduce(backend, mine, *last)
            sums = torch.stack([mine.view(torch.int32).sum(), mine.view(torch.int32).mul(torch.arange(NUMEL)).sum()])
            rank0 = sums.clone()
            dist.broadcast(rank0, 0)  # of checksums: the bytes on the cable are what is measured
            assert torch.equal(sums, rank0)
        else:
            _C.compressed_reduce_scatter(backend, output, mine, *last)
    expected = exact if operation == "all_reduce" else exact[rank * numel : (rank + 1) * numel]
    return (output - expected).abs().max().item()


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_four_bits_are_an_eighth_of_the_bytes(lab: Lab, lab_pool: Callable[[str], RankPool], operation: str) -> None:
    from zeropg.compression import BlockQuant

    pool = lab_pool("zeropg")
    sent = []
    for codec in (None, BlockQuant(4)):
        before = [lab.interface_bytes(host) for host in (0, 1)]
        errors = pool.run(reduce, operation, codec, timeout=120)
        after = [lab.interface_bytes(host) for host in (0, 1)]
        sent.append([after[host].tx - before[host].tx for host in (0, 1)])
        assert max(errors) < (1e-5 if codec is None else 0.6), errors
    for plain, compressed in zip(*sent, strict=True):
        assert compressed <= 0.13 * plain, sent


class Step(NamedTuple):
    """A step whose forward is done: what is left is the part that is measured."""

    model: nn.Module  # lives until then: DDP's reducer goes with it
    loss: torch.Tensor
    optimizer: Any  # None: the backward alone is measured, since the step moves parameters


prepared: list[Step] = []  # on each rank, from one call of the pool to the next


def ddp(codec: Any) -> nn.Module:
    from zeropg.compression import State, ddp_hook

    model = DistributedDataParallel(wide_model())
    if codec is not None:
        model.register_comm_hook(State(codec, model=model.module), ddp_hook)
    return model


def stage_0(codec: Any) -> nn.Module:
    import zeropg

    return zeropg.fully_shard(wide_model(), stage=0, compression=codec)


def stage_2(codec: Any) -> nn.Module:
    import zeropg

    return zeropg.fully_shard(wide_model(), stage=2, compression=codec)


def stage_2_both_ways(codec: Any) -> nn.Module:
    import zeropg
    from zeropg.compression import Plan

    plan = None if codec is None else Plan(gradients=codec, weights=codec)
    return zeropg.fully_shard(wide_model(), stage=2, compression=plan)


def fsdp2(codec: Any) -> nn.Module:
    from zeropg.compression import Fsdp2ReduceScatter

    model = fully_shard(wide_model(), reshard_after_forward=False)  # or the backward gathers parameters too
    if codec is not None:
        model.set_custom_reduce_scatter(Fsdp2ReduceScatter(codec))
    return model


def wide_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, NUMEL // 4096, bias=False) for _ in range(4)))


FACES = {
    "DDP": ddp,
    "stage 0": stage_0,
    "the backward of stage 2": stage_2,
    "stage 2 both ways": stage_2_both_ways,
    "the backward of FSDP2": fsdp2,
}


def prepare(face: str, codec: Any) -> None:
    import zeropg

    model = FACES[face](codec)
    optimizer = None if face.startswith("the backward") else torch.optim.SGD(model.parameters(), lr=0.1)
    if face.startswith("stage"):
        optimizer = zeropg.shard_optimizer(optimizer, model)
    prepared.clear()
    for is_last in (False, True):  # what is done once, such as DDP's new buckets, is done in the first
        x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))
        prepared[:] = [Step(model, model(x).square().mean(), optimizer)]
        if not is_last:
            finish_step()


def finish_step() -> None:
    step = prepared.pop()
    step.loss.backward()
    if step.optimizer is not None:
        step.optimizer.step()
        step.optimizer.zero_grad()
    dist.barrier()


@pytest.mark.parametrize("face", FACES)
def test_four_bits_are_an_eighth_of_the_bytes_of(lab: Lab, lab_pool: Callable[[str], RankPool], face: str) -> None:
    from zeropg.compression import BlockQuant

    pool = lab_pool("zeropg")
    sent = []
    for codec in (None, BlockQuant(4)):
        pool.run(prepare, face, codec, timeout=120)
        before = [lab.interface_bytes(host).tx for host in (0, 1)]
        pool.run(finish_step, timeout=120)
        sent.append([lab.interface_bytes(host).tx - before[host] for host in (0, 1)])
    for plain, compressed in zip(*sent, strict=True):
        assert plain >= 2 * NUMEL, "a host sends the other one at least its half"
        assert compressed <= 0.13 * plain, sent


MOST_SENT = {"top_k": 0.03, "one_bit": 0.04, "two_bit": 0.07}  # of fp32, headers included


@pytest.mark.parametrize("codec", MOST_SENT)
def test_the_smallest_codecs_under_ddp(lab: Lab, lab_pool: Callable[[str], RankPool], codec: str) -> None:
    from zeropg.compression import OneBit, TopK, TwoBit

    pool = lab_pool("zeropg")
    sent = []
    for each in (None, {"top_k": TopK(0.01), "one_bit": OneBit(), "two_bit": TwoBit()}[codec]):
        pool.run(prepare, "DDP", each, timeout=120)
        before = [lab.interface_bytes(host).tx for host in (0, 1)]
        pool.run(finish_step, timeout=120)
        sent.append([lab.interface_bytes(host).tx - before[host] for host in (0, 1)])
    for plain, compressed in zip(*sent, strict=True):
        assert plain >= 2 * NUMEL
        assert compressed <= MOST_SENT[codec] * plain, sent


def forget() -> None:
    prepared.clear()


def step_stage_3(is_encoded: bool) -> None:
    """A whole step: each unit is gathered in forward and in backward, and its gradient reduced."""
    import zeropg
    from zeropg.compression import BlockQuant, Plan

    if not prepared:
        plan = Plan(gradients=BlockQuant(4), weights=BlockQuant(8)) if is_encoded else None
        model = zeropg.fully_shard(
            wide_model(),
            stage=3,
            param_dtype=torch.bfloat16,
            reduce_dtype=None if is_encoded else torch.bfloat16,
            compression=plan,
        )
        assert model._zeropg.fetch_name == "gathered per node"
        optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        prepared[:] = [Step(model, torch.zeros(()), optimizer)]
    step = prepared[0]
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))
    step.model(x).float().square().mean().backward()
    step.optimizer.step()
    step.optimizer.zero_grad()
    dist.barrier()


def test_stage_3_sends_less_than_half_of_what_bf16_takes(lab: Lab, lab_pool: Callable[[str], RankPool]) -> None:
    pool = lab_pool("zeropg")
    sent = []
    for is_encoded in (False, True):
        pool.run(forget)
        pool.run(step_stage_3, is_encoded, timeout=120)
        before = [lab.interface_bytes(host).tx for host in (0, 1)]
        pool.run(step_stage_3, is_encoded, timeout=120)
        sent.append([lab.interface_bytes(host).tx - before[host] for host in (0, 1)])
    for plain, compressed in zip(*sent, strict=True):
        assert plain >= 2.9 * NUMEL, "a host sends the other one its half of three times the model in bf16"
        assert plain >= 2.3 * compressed, sent


def gpt_losses(codec: Any) -> list[float]:
    import zeropg

    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_optimizer(model)
    zeropg.fully_shard(model, stage=2, compression=codec)
    optimizer = zeropg.shard_optimizer(optimizer, model)
    losses = []
    for batch in make_batches():
        loss = loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    return losses


def test_the_gpt_learns_with_four_bits_between_hosts(lab_pool: Callable[[str], RankPool]) -> None:
    from zeropg.compression import BlockQuant

    pool = lab_pool("zeropg")
    exact = pool.run(gpt_losses, None, timeout=120)[0]
    results = pool.run(gpt_losses, BlockQuant(4), timeout=120)
    assert all(losses == results[0] for losses in results)
    assert results[0][-1] == pytest.approx(exact[-1], rel=0.08), (results[0], exact)
    assert results[0][-1] < 0.7 * results[0][0]
