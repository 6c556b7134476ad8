"""Queued operations end on the progress thread, synchronous ones run in the caller's: both on one group."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from tests.spawn import run_ranks


def mix_queued_and_synchronous(rounds: int) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    jitter = random.Random(rank)
    wrong = 0
    for i in range(rounds):
        first, second = torch.full((16,), float(i + rank)), torch.full((16,), float(1000 * i + rank))
        work = dist.all_reduce(first, async_op=True)
        end = time.perf_counter() + jitter.random() * 300e-6
        while time.perf_counter() < end:
            pass
        dist.all_reduce(second)
        work.wait()
        ranks = world_size * (world_size - 1) / 2
        wrong += not (first == world_size * i + ranks).all()
        wrong += not (second == world_size * 1000 * i + ranks).all()
    return wrong


def test_a_synchronous_call_right_after_a_queued_one_uses_the_other_bank() -> None:
    assert run_ranks(2, mix_queued_and_synchronous, 1000) == [0, 0]
