"""Groups that are made and dropped in any way: 100 processes in all, none of which hangs or crashes at its end."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import run_ranks


def drop(seed: int) -> None:
    """Leaves groups behind in every state: used, unused, with work that nobody waits for, closed, aborted."""
    choice = random.Random(seed)  # the same on every rank
    kept: list[Any] = []
    for _ in range(3):
        group = dist.new_group()
        how = choice.choice(["unused", "waited", "not waited", "future", "destroyed", "garbage"])
        if how != "unused":
            tensor = torch.ones(choice.choice([1, 100_000]))
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            if how == "future":
                work.get_future().then(lambda future: future.value()[0] + 1).wait()
            elif how != "not waited":
                work.wait()
                assert tensor[0].item() == dist.get_world_size()
            kept += [work, tensor] if choice.random() < 0.5 else []
        if how == "destroyed":
            dist.destroy_process_group(group)
        elif how == "garbage":
            del group
            gc.collect()
    if choice.random() < 0.3:
        dist.barrier()
        dist.distributed_c10d._abort_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_processes_end_whatever_they_leave_behind(seed: int) -> None:
    run_ranks(5, drop, seed, timeout=120)  # fails when a rank's exit code is not 0
