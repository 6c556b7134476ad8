"""`mics_shard_size`: copies of the model, each sharded over so many ranks."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed.training import STAGES, batches, make_engine, shared_folder, train, train_plain
from tests.sharding.ranks import raises
from zeropg.deepspeed.tensor_access import safe_get_full_optimizer_state


def train_in_pairs() -> list[list[float]]:
    torch.set_num_threads(1)
    losses = []
    for stage in STAGES:
        zero = {"stage": stage, "mics_shard_size": 2}
        engine = make_engine(stage, 2, zero_optimization=zero)
        core = engine.module._zeropg
        assert (core.replicas, core.shards, engine.world_size) == (2, 2, 4)
        losses.append(train(engine, batches()))
        moment = safe_get_full_optimizer_state(engine.module.norm.weight, "exp_avg")
        with shared_folder() as folder:
            engine.save_checkpoint(folder)
            other = make_engine(3 - stage, 2, zero_optimization={"stage": 3 - stage, "mics_shard_size": 4})
            other.load_checkpoint(folder)
            assert torch.equal(safe_get_full_optimizer_state(other.module.norm.weight, "exp_avg"), moment)
    with raises(ValueError, "mics_shard_size is 3, and there are 4 ranks"):
        make_engine(3, zero_optimization={"stage": 3, "mics_shard_size": 3})
    return losses


def test_groups_of_ranks_shard_a_copy_each(rank_pool) -> None:
    plain, _ = train_plain(batches())
    for of_rank in rank_pool(4).run(train_in_pairs, timeout=120):
        for losses in of_rank:
            assert losses == pytest.approx(plain, rel=1e-5)
