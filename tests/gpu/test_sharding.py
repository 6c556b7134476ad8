"""`fully_shard` on CUDA tensors: every stage, mixed precision, offload, export, and the memory that was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.gpu.gpu import WORLD_SIZES, needs_gpu, showed, use_own_gpu
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer, train_plain
from tests.spawn import RankPool, run_ranks
from zeropg.tools.plan.formulas import Settings, memory
from zeropg.tools.plan.shape import shape_of

pytestmark = needs_gpu
STEPS = 10


def train(stage: int, dtype: torch.dtype, options: dict[str, Any]) -> list[float]:
    rank, n = dist.get_rank(), dist.get_world_size()
    device = use_own_gpu(rank)
    model = zeropg.fully_shard(make_model(dtype).to(device), stage=stage, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    losses = []
    for batch in make_batches(STEPS):
        loss = loss_of(model, batch.chunk(n)[rank].to(device))
        loss.backward()
        zeropg.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / n)
    return losses


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_stage_trains_on_gpus_as_one_plain_process_on_a_cpu(world_size: int) -> None:
    reference = train_plain(torch.float64)[0][:STEPS]
    with RankPool(world_size) as pool:
        runs = [pool.run(train, stage, torch.float64, {}, timeout=120)[0] for stage in range(4)]
    for stage, losses in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) < 1e-8, stage
    showed(f"stages 0 to 3 on {world_size} GPU: loss {reference[0]:.3f} -> {reference[-1]:.3f}, the CPU's to 1e-8")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bfloat16_with_float32_masters_trains_in_every_stage(world_size: int) -> None:
    reference = train_plain(torch.float32)[0][:STEPS]
    with RankPool(world_size) as pool:
        options = {"param_dtype": torch.bfloat16}
        runs = [pool.run(train, stage, torch.float32, options, timeout=120)[0] for stage in range(4)]
    for stage, losses in enumerate(runs):
        assert max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) < 0.05, stage
    showed(f"bf16 on {world_size} GPU: last losses of stages 0 to 3 {[round(run[-1], 4) for run in runs]}")


def offloaded(where: Any) -> list[float] | str:
    try:
        return train(3, torch.float32, {"offload_optimizer": where})
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_optimizer_offloaded_to_the_host_gives_the_same_losses(world_size: int) -> None:
    with RankPool(world_size) as pool:
        kept = pool.run(train, 3, torch.float32, {}, timeout=120)[0]
        moved = pool.run(offloaded, "cpu", timeout=120)[0]
    if isinstance(moved, str):
        pytest.skip(f"this build offloads no optimizer: {moved}")
    assert max(abs(a - b) / b for a, b in zip(moved, kept, strict=True)) < 1e-5
    showed(f"optimizer state on the host, {world_size} GPU: loss {moved[-1]:.4f}, on the GPU {kept[-1]:.4f}")


class Wide(nn.Module):
    """Eight matrices of 16 MiB and hardly any activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def train_wide(stage: int) -> tuple[int, int]:
    """(planned, highest) bytes of this rank's GPU."""
    device = use_own_gpu(dist.get_rank())
    model = Wide().to(device)
    settings = Settings(stage=stage, ranks=dist.get_world_size(), device="cuda")
    planned = sum(holding.bytes for holding in memory(shape_of(model), settings))
    zeropg.fully_shard(model, stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()  # what sharding itself took is gone
        model(torch.ones(2, 2048, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return planned, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_says_what_a_gpu_holds(world_size: int, stage: int) -> None:
    ((planned, highest), *_) = run_ranks(world_size, train_wide, stage, timeout=120)
    showed(f"stage {stage}, {world_size} GPU: {highest / 2**20:.0f} MiB at most, planned {planned / 2**20:.0f} MiB")
    assert 0.7 * planned < highest < 1.3 * planned


def export_from_gpu(folder: str) -> dict[str, torch.Tensor]:
    device = use_own_gpu(dist.get_rank())
    model = zeropg.fully_shard(make_model().to(device), stage=3)
    zeropg.save_16bit_weights(model, folder)
    return {name: tensor.cpu() for name, tensor in zeropg.full_state_dict(model, rank0_only=False).items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_exported_from_a_gpu_are_the_models(world_size: int, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state, *_ = run_ranks(world_size, export_from_gpu, str(tmp_path), timeout=120)
    saved: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        saved |= safetensors.load_file(file)
    assert saved and all(torch.equal(tensor, state[name].to(torch.bfloat16)) for name, tensor in saved.items())
    showed(f"{len(saved)} tensors exported from {world_size} GPU, bit for bit the model's in bf16")


def checkpoint_on_gpu(folder: str) -> bool | str:
    if not hasattr(zeropg, "save_checkpoint"):
        return "this build has no save_checkpoint"
    device = use_own_gpu(dist.get_rank())

    def make() -> tuple[Any, Any]:
        model = zeropg.fully_shard(make_model().to(device), stage=3)
        return model, zeropg.shard_optimizer(make_optimizer(model), model)

    def step(model: Any, optimizer: Any, batch: torch.Tensor) -> float:
        loss = loss_of(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first, second, third = make_batches(3)
    model, optimizer = make()
    step(model, optimizer, first)
    zeropg.save_checkpoint(folder, model, optimizer)
    expected = [step(model, optimizer, batch) for batch in (second, third)]
    model, optimizer = make()
    zeropg.load_checkpoint(folder, model, optimizer)
    return [step(model, optimizer, batch) for batch in (second, third)] == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_goes_on_from_a_checkpoint_on_gpus(world_size: int, tmp_path: Path) -> None:
    for answer in run_ranks(world_size, checkpoint_on_gpu, str(tmp_path / "checkpoint"), timeout=120):
        if isinstance(answer, str):
            pytest.skip(answer)
        assert answer
    showed(f"saved and loaded on {world_size} GPU; the next losses are the same bits")


def offload_and_reload(stage: int) -> tuple[int, int, int, bool]:
    """Bytes on the GPU before, between and after, and whether training goes on as without the trip."""
    from zeropg import deepspeed

    device = use_own_gpu(dist.get_rank())
    engines = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        config |= {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        engines.append(deepspeed.initialize(model=model, config=config)[0])

    def step(engine: Any, seed: int) -> float:
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(seed)).to(device)
        loss = (engine(x).float() - x).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    plain, moved = engines
    assert step(plain, 0) == step(moved, 0)
    held = torch.cuda.memory_allocated()
    moved.offload_states()
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated()
    moved.reload_states()
    torch.cuda.synchronize()
    return held, between, torch.cuda.memory_allocated(), step(plain, 1) == step(moved, 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_states_leave_the_gpu_and_come_back(world_size: int) -> None:
    for stage in range(4):
        held, between, after, is_same = run_ranks(world_size, offload_and_reload, stage, timeout=120)[0]
        assert is_same and between < 0.6 * held and after > between, (stage, held, between, after)  # one of two engines
        showed(f"stage {stage} on {world_size} GPU: {held:,} -> {between:,} -> {after:,} bytes")
