"""A job of two ranks under the real DeepSpeed: `python -m tests.deepspeed.real_job FOLDER STAGE DTYPE`.

Saves a checkpoint, and beside it what DeepSpeed itself says that the masters were and how its losses go on.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.deepspeed.test_foreign_checkpoint import Net, param_groups

WORLD_SIZE, STEPS, FURTHER = 2, 3, 2


def batch(step: int) -> torch.Tensor:
    """[12]: every rank's tokens of a step, for 1, 2 or 3 ranks."""
    return (torch.arange(12) * 5 + step).remainder(11)


def run(rank: int, port: int, folder: Path, stage: int, dtype: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed = importlib.import_module("deepspeed")
    model = Net()
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    decays, rest = param_groups(model)
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.1), config=config)
    train(engine, rank, range(STEPS))
    engine.save_checkpoint(str(folder), client_state={"epoch": 4})
    masters = {n: master(deepspeed, stage, p) for n, p in model.named_parameters() if p.requires_grad}
    losses = train(engine, rank, range(STEPS, STEPS + FURTHER))
    if rank == 0:
        torch.save({"masters": masters, "losses": losses}, folder / "truth.pt")
    dist.destroy_process_group()


def train(engine: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = batch(step).chunk(WORLD_SIZE)[rank]
        loss = torch.nn.functional.cross_entropy(engine(x).float(), x)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD_SIZE)
    return losses


def master(deepspeed: Any, stage: int, parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach() if stage == 0 else deepspeed.utils.safe_get_full_fp32_param(parameter)
    return value.clone()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    arguments = (free_port, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    torch.multiprocessing.spawn(run, args=arguments, nprocs=WORLD_SIZE)
