"""Compressed reductions between hosts: what crosses the cables, and that all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lab.lab import Lab
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import RankPool

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
        assert compressed <= 0.135 * plain, sent


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
