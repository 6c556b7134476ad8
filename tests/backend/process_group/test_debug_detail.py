"""TORCH_DISTRIBUTED_DEBUG: torch's checking wrapper around every operation, and what is said of each group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.spawn import run_ranks

COUNTED = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
    "reduce_scatter", "all_to_all_single", "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip


def every_operation() -> None:
    import zeropg

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    rank, size, ones = dist.get_rank(), dist.get_world_size(), torch.ones(2)
    total = ones.clone()
    dist.all_reduce(total)
    dist.reduce(total, 0)
    dist.broadcast(total, 1)
    lists = [torch.empty(2) for _ in range(size)]
    dist.all_gather(lists, ones)
    assert torch.equal(torch.cat(lists), torch.ones(2 * size))
    whole = torch.empty(2 * size)
    dist.all_gather_into_tensor(whole, ones)
    dist.reduce_scatter_tensor(total, whole)
    dist.reduce_scatter(total, [ones] * size)
    assert total.tolist() == [size, size]
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    dist.all_to_all([torch.empty(1) for _ in range(size)], list(torch.ones(size).chunk(size)))
    dist.gather(ones, lists if rank == 0 else None)
    dist.scatter(total, lists if rank == 0 else None)
    if rank == 0:
        dist.send(ones, 1)
    else:
        dist.recv(total, 0)
    dist.barrier()
    dist.all_gather_object([None] * size, {"rank": rank})
    child = dist.new_group([0, 1])
    dist.all_reduce(ones, group=child)
    counted = zeropg.stats()
    for name in COUNTED:
        assert counted[name]["calls"] >= 1 and counted[name]["seconds"] > 0, (name, counted)
        assert len(counted[name]["waiting_seconds"]) == size
    assert counted["all_reduce"]["bytes"] >= 8
    assert counted["send" if rank == 0 else "recv"]["calls"] == 1
    assert zeropg.stats(child)["all_reduce"]["calls"] >= 1


def test_every_operation_runs_under_the_wrapper() -> None:
    run_ranks(2, every_operation, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, fresh=True, timeout=180)


def read_line() -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        dist.new_group()
    return text.getvalue()


def test_a_line_says_what_each_group_is() -> None:
    lines = run_ranks(2, read_line, env={"TORCH_DISTRIBUTED_DEBUG": "INFO"}, fresh=True, timeout=180)
    for rank, line in enumerate(lines):
        assert f"[zeropg rank {rank}/2] made the group '" in line and "2 ranks on 1 node, timeout " in line, line
