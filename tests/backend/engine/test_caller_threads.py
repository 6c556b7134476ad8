"""What a group leaves behind on the threads that waited for it: nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time

import pytest
import torch
import torch.distributed as dist

from tests.spawn import run_ranks

SYS_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def scheduling() -> tuple[int, int, int, int]:
    """Policy, flags (reset on fork), niceness and time slice in nanoseconds of the calling thread."""
    attributes = ctypes.create_string_buffer(48)  # the kernel's struct sched_attr
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(SYS_SCHED_GETATTR[platform.machine()], 0, attributes, 48, 0) != 0:
        raise OSError(ctypes.get_errno(), "sched_getattr")
    _, policy, flags, nice, _, slice_ns, _, _ = struct.unpack("IIQiIQQQ", attributes.raw)
    return policy, flags, nice, slice_ns


def wait_long() -> list[tuple[int, int, int, int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = [scheduling()]
    group = dist.new_group()
    for call in ("all_reduce", "message"):
        for _ in range(3):
            dist.barrier(group)
            if rank == 0:
                time.sleep(0.1)  # the others run out of patience
            if call == "all_reduce":
                dist.all_reduce(torch.ones(3), group=group)
            elif rank == 0:
                for peer in range(1, size):
                    dist.send(torch.ones(3), peer, group=group)
            else:
                dist.recv(torch.ones(3), 0, group=group)
            seen.append(scheduling())
    dist.destroy_process_group(group)
    seen.append(scheduling())
    child = os.fork()
    if child == 0:
        os._exit(0 if scheduling() == seen[0] else 1)
    assert os.waitpid(child, 0)[1] == 0, "a child has what its parent had"
    return seen


@pytest.mark.skipif(platform.machine() not in SYS_SCHED_GETATTR, reason="the number of the system call")
def test_a_group_leaves_time_slice_and_flags_of_the_thread_as_they_were() -> None:
    for seen in run_ranks(3, wait_long):
        before, after = seen[0], seen[-1]
        assert before == after
        assert {flags for _, flags, _, _ in seen} == {before[1]}
