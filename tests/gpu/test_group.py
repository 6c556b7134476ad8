"""The process group on CUDA tensors: NCCL inside, CPU tensors of the same group beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.gpu import WORLD_SIZES, needs_gpu, showed, use_own_gpu
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import RankPool, run_ranks

pytestmark = needs_gpu


def every_collective(dtype: torch.dtype) -> dict[str, bool]:
    """Whether each collective gives on CUDA tensors what it gives on CPU tensors of the same group."""
    rank, n = dist.get_rank(), dist.get_world_size()
    device = use_own_gpu(rank)
    mine = ((torch.arange(12 * n) + 5 * rank) % 7).to(dtype)

    def run(where: torch.device) -> dict[str, torch.Tensor]:
        results = {}
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            tensor = mine.to(where, copy=True)
            dist.all_reduce(tensor, op=op)
            results[f"all_reduce {op}"] = tensor
        tensor = mine.to(where, copy=True)
        dist.broadcast(tensor, src=n - 1)
        results["broadcast"] = tensor
        gathered = torch.empty(n * mine.numel(), dtype=dtype, device=where)
        dist.all_gather_into_tensor(gathered, mine.to(where))
        results["all_gather_into_tensor"] = gathered
        parts = [torch.empty_like(mine, device=where) for _ in range(n)]
        dist.all_gather(parts, mine.to(where))
        results["all_gather"] = torch.cat(parts)
        slice_ = torch.empty(12, dtype=dtype, device=where)
        dist.reduce_scatter_tensor(slice_, mine.to(where))
        results["reduce_scatter_tensor"] = slice_
        exchanged = torch.empty_like(mine, device=where)
        dist.all_to_all_single(exchanged, mine.to(where))
        results["all_to_all_single"] = exchanged
        work = dist.all_reduce(tensor := mine.to(where, copy=True), async_op=True)
        work.wait()
        results["asynchronous all_reduce"] = tensor
        dist.barrier()
        return results

    on_gpu, on_cpu = run(device), run(torch.device("cpu"))
    torch.cuda.synchronize()
    assert all(tensor.device == device for tensor in on_gpu.values())
    return {name: torch.equal(tensor.cpu(), on_cpu[name]) for name, tensor in on_gpu.items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_on_cuda_tensors_agree_with_cpu_tensors_of_the_same_group(world_size: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    with RankPool(world_size) as pool:
        for dtype in dtypes:
            for answers in pool.run(every_collective, dtype, timeout=120):
                assert all(answers.values()), (dtype, [name for name, same in answers.items() if not same])
    showed(
        f"{len(answers)} collectives x {len(dtypes)} dtypes on {world_size} GPU: as on CPU tensors of the same group"
    )


def interleaved() -> bool:
    """CUDA and CPU operations of one group, queued in turn."""
    device = use_own_gpu(dist.get_rank())
    n = dist.get_world_size()
    works, tensors = [], []
    for index in range(20):
        tensor = torch.full((1000 + index,), float(index), device=device if index % 2 else "cpu")
        works.append(dist.all_reduce(tensor, async_op=True))
        tensors.append(tensor)
    for work in works:
        work.wait()
    return all(bool((tensor == index * n).all()) for index, tensor in enumerate(tensors))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_cuda_and_cpu_operations_may_be_mixed(world_size: int) -> None:
    assert all(run_ranks(world_size, interleaved, timeout=120))
    showed(f"20 asynchronous operations, CUDA and CPU in turn, on {world_size} GPU")


def train_ddp(where: str) -> list[float]:
    rank, n = dist.get_rank(), dist.get_world_size()
    device = use_own_gpu(rank) if where == "cuda" else torch.device("cpu")
    model = DistributedDataParallel(make_model(torch.float64).to(device))
    optimizer = make_optimizer(model)
    losses = []
    for batch in make_batches(10):
        loss = loss_of(model, batch.chunk(n)[rank].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / n)
    return losses


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ddp_trains_on_gpus_as_on_cpus(world_size: int) -> None:
    with RankPool(world_size) as pool:
        on_gpu, on_cpu = (pool.run(train_ddp, where, timeout=120)[0] for where in ("cuda", "cpu"))
    assert on_gpu[-1] < on_gpu[0]
    assert max(abs(a - b) / b for a, b in zip(on_gpu, on_cpu, strict=True)) < 1e-8
    showed(f"DDP on {world_size} GPU: loss {on_gpu[0]:.3f} -> {on_gpu[-1]:.3f} in 10 steps, CPU's to 1e-8")


def make_another_group() -> Any:
    device = use_own_gpu(dist.get_rank())
    group = dist.new_group(backend="zeropg")
    tensor = torch.ones(5, device=device)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    after = torch.ones(5, device=device)
    dist.all_reduce(after)
    return tensor.tolist(), after.tolist()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_second_group_comes_and_goes(world_size: int) -> None:
    for answer in run_ranks(world_size, make_another_group, timeout=120):
        assert answer == ([float(world_size)] * 5, [float(world_size)] * 5)
    showed("a second group on CUDA, destroyed; the first one goes on")
