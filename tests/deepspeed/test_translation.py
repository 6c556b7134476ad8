"""What a configuration is translated to trains: the arguments go to the real calls, on two ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import zeropg
from tests.deepspeed.configs import MS_SWIFT, training_arguments
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import run_ranks
from zeropg.deepspeed.config import (
    fill,
    hugging_face_auto,
    optimizer_of,
    read,
    scheduler_of,
    sharding_arguments,
)
from zeropg.deepspeed.muon import tag_hidden_matrices

STEPS = 4
ADAMW = {"type": "AdamW", "params": {"lr": 4e-3}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Some that differ in each argument of fully_shard."""
    auto = hugging_face_auto(training_arguments(), hidden_size=36)
    cases = {name: fill(config, auto) for name, config in MS_SWIFT.items()}
    zero = {
        "nvme": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "quantized": {"stage": 1, "zero_quantized_gradients": True, "zero_quantized_weights": True},
        "one_bit": {"stage": 1},
        "lamb": {"stage": 2},
        "muon": {"stage": 3},
    }
    cases |= {name: {"train_batch_size": 12, "zero_optimization": block} for name, block in zero.items()}
    cases = {name: config | {"optimizer": ADAMW, "scheduler": WARMUP} for name, config in cases.items()}
    cases["one_bit"]["optimizer"] = {"type": "OneBitAdam", "params": {"lr": 4e-3, "freeze_step": 2}}
    cases["lamb"]["optimizer"] = {"type": "Lamb", "params": {"lr": 4e-3, "min_coeff": 1.0, "max_coeff": 1.0}}
    cases["muon"]["optimizer"] = {"type": "Muon", "params": {"lr": 4e-3, "adam_lr": 2e-2}}
    return cases


def train(config: dict[str, Any]) -> list[float]:
    """The losses of some steps, as the configuration says."""
    settings = read(config, world_size=2)
    model = zeropg.fully_shard(make_model(), **sharding_arguments(settings))
    tag_hidden_matrices(model)
    make_optimizer, make_schedule = optimizer_of(settings), scheduler_of(settings)
    assert make_optimizer is not None and make_schedule is not None
    optimizer = zeropg.shard_optimizer(make_optimizer(model.parameters()), model)
    schedule = make_schedule(optimizer)
    losses = []
    for batch in make_batches(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 4e-3
    return losses


def train_all(folder: str) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    return {name: train(config) for name, config in configurations(Path(folder)).items()}


def test_configurations_train_as_they_say(tmp_path: Path) -> None:
    losses = run_ranks(2, train_all, str(tmp_path), timeout=240)[0]
    assert all(math.isfinite(loss) for run in losses.values() for loss in run)
    # Stages and offload change no bit; the first two steps have no rate yet.
    stages = [losses[name] for name in MS_SWIFT]
    assert all(run == stages[0] for run in stages)
    assert all(run[-1] < run[0] for run in losses.values())
    assert losses["quantized"] != losses["nvme"]
