"""Whole state dicts that are not the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import SeparateHosts, run_ranks


def check_a_missing_key_on_one_rank(stage: int) -> None:
    rank = dist.get_rank()
    model = zeropg.fully_shard(make_model(), stage=stage)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    state = make_model(seed=1).state_dict()
    short = {name: value for name, value in state.items() if name != "norm.bias" or rank == 0}
    with pytest.raises(RuntimeError, match=r'load_state_dict: rank 1: (?s:.*)Missing key.*"norm.bias"'):
        model.load_state_dict(short)
    assert model.load_state_dict(state) == ([], [])
    plain = make_model(seed=1)
    stepper = make_optimizer(plain)
    for batch in make_batches()[:2]:
        loss_of(plain, batch).backward()
        loss_of(model, batch.chunk(2)[rank]).backward()
        for one in (stepper, optimizer):
            one.step()
            one.zero_grad()
    trained = zeropg.full_state_dict(model, rank0_only=False)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(trained[name], value.detach())


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_key_that_one_rank_lacks_is_an_error_on_all(stage: int, hosts: tuple[int, ...]) -> None:
    """The others used to go on to a collective and wait there for the group's whole timeout."""
    run_ranks(2, check_a_missing_key_on_one_rank, stage, place=SeparateHosts(hosts=hosts))


def check_distributed_checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    for stage, other in ((3, 1), (1, 3)):
        model = zeropg.fully_shard(make_model(), stage=stage)
        expected = zeropg.full_state_dict(model, rank0_only=False)
        dcp.save({"model": expected}, checkpoint_id=f"{folder}/{stage}")
        fresh = zeropg.fully_shard(make_model(seed=1), stage=other)
        state = zeropg.full_state_dict(fresh, rank0_only=False)
        dcp.load({"model": state}, checkpoint_id=f"{folder}/{stage}")
        fresh.load_state_dict(state)
        found = zeropg.full_state_dict(fresh, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_torchs_distributed_checkpoints_take_whole_state_dicts(tmp_path: Path) -> None:
    run_ranks(2, check_distributed_checkpoints, str(tmp_path))
