"""What a rank holds of a group grows with what it needs, not with its groups."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.spawn import run_ranks

RANKS = 6


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_groups() -> list[int]:
    dist.barrier()
    counts = []
    groups = []
    for _ in range(3):
        before = descriptors()
        groups.append(dist.new_group())
        counts.append(descriptors() - before)
    for group in groups:  # each wakes its ranks through the doorbells that all share
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.eq(RANKS).all()
    dist.destroy_process_group(groups[0])
    total = torch.ones(3)
    dist.all_reduce(total, group=groups[1])
    assert total.eq(RANKS).all()
    return counts


def test_a_further_group_of_the_same_ranks_takes_no_descriptor_for_each_of_them() -> None:
    for rank, counts in enumerate(run_ranks(RANKS, make_groups)):
        sockets = RANKS - 1 if rank == 0 else 1  # to hand out descriptors: the leader's to each, the others' to it
        assert max(counts) <= sockets + 2, (rank, counts)  # and the arena and the pool
