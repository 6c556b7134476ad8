"""What the tests on GPUs share: when they run, and saying what they showed."""

from __future__ import annotations

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(GPUS == 0, reason="torch finds no CUDA device here (python -m zeropg doctor says why)"),
]
# NCCL refuses two ranks on one GPU, so one GPU means groups of one rank.
WORLD_SIZES = [
    1,
    pytest.param(2, marks=pytest.mark.skipif(GPUS < 2, reason=f"two ranks need two GPUs, here: {GPUS}")),
]


def use_own_gpu(rank: int) -> torch.device:
    """Makes GPU `rank` this process's current one."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def showed(text: str) -> None:
    """Printed as it comes under `pytest -s`, as tests/gpu/run.sh runs it."""
    print(f"\n    showed: {text}", flush=True)
