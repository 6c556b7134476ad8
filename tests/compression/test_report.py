"""What `zeropg.compression.report` says is what was encoded, and what is still owed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeropg
from zeropg.compression import BlockQuant, State, all_reduce, report

STEPS, NUMEL = 3, 40_000


def report_of_own_loop() -> tuple[Any, float, str]:
    codec = BlockQuant(4)
    state = State(codec)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        all_reduce(torch.randn(NUMEL, generator=generator), codec, state=state, name="encoder")
    owed = sum(float(values.square().sum()) for *_, values in state.residuals.segments()) ** 0.5
    return report(state), owed, str(report(state))


def test_a_state_reports_bytes_times_and_what_is_owed(rank_pool: Any) -> None:
    for said, owed, text in rank_pool(2).run(report_of_own_loop):
        # Both contribution and result of each half are encoded: by this rank the other's half, and its own sum.
        assert said.plain_bytes == STEPS * 4 * NUMEL
        assert said.encoded_bytes == pytest.approx(0.127 * said.plain_bytes, rel=0.01)
        assert said.encode_seconds > 0 and said.decode_seconds > 0
        assert said.exposed_seconds is None
        assert said.residual_norm == pytest.approx(owed, rel=1e-5)
        assert list(said.residual_norms) == ["encoder"]
        assert "MB saved" in text and "encoder" in text


def report_of_a_sharded_model(stage: int) -> Any:
    torch.manual_seed(0)
    model = zeropg.fully_shard(torch.nn.Linear(64, 64), stage=stage, compression=BlockQuant(8))
    model(torch.randn(4, 64)).square().mean().backward()
    return report(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_sharded_model_reports_its_gradients(rank_pool: Any, stage: int) -> None:
    for said in rank_pool(2).run(report_of_a_sharded_model, stage):
        assert 0 < said.encoded_bytes < said.plain_bytes
        assert said.exposed_seconds is not None and said.exposed_seconds > 0
        assert set(said.residual_norms) <= {"weight", "bias"}


def statistics_of_a_group() -> tuple[Any, Any, Any]:
    before = zeropg.stats().get("compression")
    codec = BlockQuant(4)
    all_reduce(torch.randn(NUMEL), codec)  # nobody's
    state = State(codec)
    for each in (codec, BlockQuant(8)):  # counters go on under another codec
        state.use(each)
        all_reduce(torch.randn(NUMEL), each, state=state, name="encoder")
    return before, zeropg.stats()["compression"], report(state)


def test_the_statistics_of_a_group_have_all_that_travelled_encoded() -> None:
    from tests.spawn import run_ranks

    for before, after, said in run_ranks(2, statistics_of_a_group):
        assert before is None
        assert after["calls"] == 3 and after["plain_bytes"] == 3 * 4 * NUMEL
        assert said.plain_bytes == 2 * 4 * NUMEL
        assert said.encoded_bytes == pytest.approx((0.127 + 0.252) * 4 * NUMEL, rel=0.01)
        assert after["wire_seconds"] > said.wire_seconds > 0
        assert after["residual_norms"] == said.residual_norms and after["exposed_seconds"] is None


def test_a_model_without_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="no compressed gradients"):
        report(torch.nn.Linear(2, 2))
