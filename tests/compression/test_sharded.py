"""`fully_shard(compression=...)`, stages 0 to 3."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from zeropg.compression import BlockQuant, Codec, Plan, TopK
from zeropg.compression.state import RESULT_HOP


def make_sharded(codec: Codec | Plan | None, stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model)
    zeropg.fully_shard(model, stage=stage, compression=codec, **options)
    return model, zeropg.shard_optimizer(optimizer, model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        zeropg.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    return losses


def flat(model: nn.Module) -> torch.Tensor:
    with zeropg.full_parameters(model):
        return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("codec", "tolerance"), [(BlockQuant(8), 0.02), (BlockQuant(4), 0.08)], ids=str)
@on_ranks(2)
def test_learns_as_without_compression(codec: Codec, tolerance: float, stage: int) -> None:
    batches = make_batches()
    expected = train(*make_sharded(None, stage), batches)
    model, optimizer = make_sharded(codec, stage)
    losses = train(model, optimizer, batches)
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=tolerance), (losses, expected)
    assert losses[-1] < 0.7 * losses[0]
    mine = flat(model)
    rank0 = mine.clone()
    dist.broadcast(rank0, 0)
    assert torch.equal(mine, rank0)


@on_ranks(2)
def test_stages_that_reduce_alike_have_the_same_losses() -> None:
    """All-reduces encode the averages too, reduce-scatters do not."""
    batches = make_batches(8)
    losses = [train(*make_sharded(BlockQuant(4), stage), batches) for stage in STAGES]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_residuals_have_the_names_of_parameters_and_can_be_taken_over(stage: int) -> None:
    batches = make_batches(9)
    first, first_optimizer = make_sharded(BlockQuant(4), stage)
    train(first, first_optimizer, batches[:4])
    store = first._zeropg.residuals  # type: ignore[union-attr]
    names = dict(first.named_parameters())
    assert store.bytes > 0
    for name, hop, start, values in store.segments():
        assert hop in ((0, 1) if stage < 2 else (0,))
        assert start + values.numel() <= names[name].numel()
    second, second_optimizer = make_sharded(BlockQuant(4), stage)
    train(second, second_optimizer, batches[:4])
    other = second._zeropg.residuals  # type: ignore[union-attr]
    other.clear()
    for name, hop, start, values in store.segments():
        other.load(name, hop, start, values)
    train(first, first_optimizer, batches[4:])
    train(second, second_optimizer, batches[4:])
    assert torch.equal(flat(first), flat(second))
    third, third_optimizer = make_sharded(BlockQuant(4), stage)
    train(third, third_optimizer, batches[:4])
    third._zeropg.residuals.clear()  # type: ignore[union-attr]
    train(third, third_optimizer, batches[4:])
    assert not torch.equal(flat(first), flat(third))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_accumulation_encodes_once_and_zero_grad_leaves_residuals(stage: int) -> None:
    batches = make_batches(2)
    model, _ = make_sharded(BlockQuant(4), stage)
    store = model._zeropg.residuals  # type: ignore[union-attr]
    with zeropg.no_sync(model):
        loss_of(model, batches[0]).backward()
    assert store.bytes == 0
    loss_of(model, batches[1]).backward()
    kept = [(name, hop, start, values.clone()) for name, hop, start, values in store.segments()]
    assert any(values.any() for *_, values in kept)
    model.zero_grad()
    for (*_, before), (*_, after) in zip(kept, store.segments(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_nan_on_one_rank_is_seen_by_all(stage: int) -> None:
    batch = make_batches(1)[0]
    model, _ = make_sharded(BlockQuant(4), stage)
    loss = loss_of(model, batch)
    (loss * float("nan") if dist.get_rank() == 1 else loss).backward()
    assert math.isnan(zeropg.clip_grad_norm_(model, 1.0))
    store = model._zeropg.residuals  # type: ignore[union-attr]
    assert all(values.isfinite().all() for *_, values in store.segments())


@on_ranks(2)
def test_a_skipped_step_scales_what_is_pending_with_the_loss() -> None:
    batches = make_batches(3)
    model, optimizer = make_sharded(BlockQuant(4), 2)
    store = model._zeropg.residuals  # type: ignore[union-attr]
    scaler = zeropg.GradScaler(init_scale=2.0**10)
    for step, batch in enumerate(batches):
        loss = loss_of(model, batch)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = [values.clone() for *_, values in store.segments()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        factor = 0.5 if step == 1 else 1.0
        for old, (*_, new) in zip(before, store.segments(), strict=True):
            assert torch.equal(new, factor * old) and new.isfinite().all()
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_the_summary_and_the_memory_report_say_so(param_dtype: torch.dtype | None) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, optimizer = make_sharded(BlockQuant(4), 2, param_dtype=param_dtype)
    if dist.get_rank() == 0:
        assert "averaged in float32 as block_quant(bits=4, block=256) with error feedback" in said.getvalue()
    assert model._zeropg.memory_report()["residuals"] == 0  # type: ignore[union-attr]
    losses = train(model, optimizer, make_batches(10))
    assert losses[-1] < losses[0]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 0 < model._zeropg.memory_report()["residuals"] <= 4 * count  # type: ignore[union-attr]


@on_ranks(2)
def test_without_error_feedback_nothing_is_kept() -> None:
    model, optimizer = make_sharded(BlockQuant(8, error_feedback=False), 3)
    train(model, optimizer, make_batches(2))
    assert model._zeropg.residuals.segments() == []  # type: ignore[union-attr]


@on_ranks(2)
def test_what_cannot_be_compressed_is_refused_before_anything_is_sharded() -> None:
    model = nn.Linear(8, 8)
    with raises(TypeError, "fully_shard", "expected a codec such as"):
        zeropg.fully_shard(model, compression=4)  # type: ignore[arg-type]
    with raises(ValueError, "reduce_dtype is torch.bfloat16"):
        zeropg.fully_shard(model, compression=BlockQuant(4), reduce_dtype=torch.bfloat16)
    with raises(ValueError, "'weight'", "float64"):
        zeropg.fully_shard(nn.Linear(8, 8).double(), compression=BlockQuant(4))
    gloo = dist.new_group(backend="gloo")
    with raises(ValueError, "needs a group of zeropg", "gloo"):
        zeropg.fully_shard(model, compression=BlockQuant(4), process_group=gloo)
    codec = BlockQuant(4 if dist.get_rank() == 0 else 8)
    with raises(ValueError, "compression=Plan(gradients=BlockQuant(", "bits=8", "bits=4"):
        zeropg.fully_shard(model, compression=codec)
    plan = Plan(gradients=BlockQuant(4), exclude=("*.embed",) if dist.get_rank() == 0 else ())
    with raises(ValueError, "exclude=('*.embed',)", "exclude=()"):
        zeropg.fully_shard(model, compression=plan)
    zeropg.fully_shard(model, compression=BlockQuant(4))


def save_and_go_on(folder: str, stage: int) -> torch.Tensor:
    batches = make_batches(8)
    model, optimizer = make_sharded(BlockQuant(4), stage)
    train(model, optimizer, batches[:4])
    zeropg.save_checkpoint(folder, model, optimizer)
    train(model, optimizer, batches[4:])
    return flat(model)


def load_and_go_on(folder: str, codec: Codec | None, stage: int) -> torch.Tensor:
    model, optimizer = make_sharded(codec, stage)
    train(model, optimizer, make_batches(1))  # what was there before must not show
    zeropg.load_checkpoint(folder, model, optimizer)
    train(model, optimizer, make_batches(8)[4:])
    return flat(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_hold_residuals(rank_pool: Any, tmp_path: Path, stage: int) -> None:
    expected = rank_pool(2).run(save_and_go_on, str(tmp_path), stage)
    assert sorted(path.name for path in tmp_path.rglob("residuals-*")) == [
        "residuals-00000.safetensors",
        "residuals-00001.safetensors",
    ]
    assert torch.equal(rank_pool(2).run(load_and_go_on, str(tmp_path), BlockQuant(4), stage)[0], expected[0])
    without = rank_pool(2).run(load_and_go_on, str(tmp_path), BlockQuant(4, error_feedback=False), stage)
    assert not torch.equal(without[0], expected[0])
    torch.testing.assert_close(without[0], expected[0], atol=0.05, rtol=0)


def owed_to_the_average(model: Any) -> dict[str, torch.Tensor]:
    """What encodings have lost of the averaged gradients so far, by parameter."""
    world_size = dist.get_world_size()
    owed = {name: torch.zeros(parameter.numel()) for name, parameter in make_model().named_parameters()}
    for name, hop, start, values in model._zeropg.residuals.segments():
        if name:
            owed[name][start : start + len(values)] += values / (1 if hop == RESULT_HOP else world_size)
    for values in owed.values():
        dist.all_reduce(values)
    return owed


def save_what_is_owed(folder: str, stage: int) -> None:
    model, optimizer = make_sharded(BlockQuant(4), stage)
    train(model, optimizer, make_batches(3))
    zeropg.save_checkpoint(folder, model, optimizer)
    owed = owed_to_the_average(model)
    if dist.get_rank() == 0:
        torch.save(owed, Path(folder, "owed.pt"))


def check_what_is_owed(folder: str, stage: int, again: str = "") -> None:
    owed = torch.load(Path(folder, "owed.pt"))
    model, optimizer = make_sharded(BlockQuant(4), stage)
    train(model, optimizer, make_batches(1))  # what was there before must not show
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeropg.load_checkpoint(folder, model, optimizer)
    if again:  # before anything is paid
        zeropg.save_checkpoint(again, model, optimizer)
        if dist.get_rank() == 0:
            torch.save(owed, Path(again, "owed.pt"))
        return
    (loss_of(model, make_batches(1)[0].chunk(dist.get_world_size())[dist.get_rank()]) * 0).backward()
    left = owed_to_the_average(model)
    with zeropg.full_gradients(model):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.flatten() + left[name], owed[name], rtol=1e-4, atol=1e-7)
    assert sum(values.abs().sum() for values in owed.values()) > 0


@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.soak) for stage in (1, 2))])
def test_at_another_world_size_residuals_are_still_owed(rank_pool: Any, tmp_path: Path, stage: int) -> None:
    folder, again = str(tmp_path / "a"), str(tmp_path / "b")
    rank_pool(3).run(save_what_is_owed, folder, stage)
    for world_size in (1, 2, 3, 4):
        rank_pool(world_size).run(check_what_is_owed, folder, stage)
    rank_pool(2).run(check_what_is_owed, folder, stage, again)
    for world_size in (2, 4):
        rank_pool(world_size).run(check_what_is_owed, again, stage)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_a_plan_leaves_out_is_averaged_as_it_is(stage: int) -> None:
    batch = make_batches(1)[0]
    expected, _ = make_sharded(None, stage)
    loss_of(expected, batch).backward()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, _ = make_sharded(Plan(gradients=TopK(0.05), exclude=("head.*", "blocks.1.*")), stage)
    loss_of(model, batch).backward()
    encoded = set()
    with zeropg.full_gradients(expected), zeropg.full_gradients(model):
        for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
            if torch.allclose(one.grad, other.grad, rtol=1e-6, atol=1e-9):
                continue
            encoded.add(name)
            assert other.grad.count_nonzero() <= 0.2 * other.numel(), name
    matrices = ("attention.weight", "projection.weight", "up.weight", "down.weight")
    # The head is the embedding, which is excluded by that name; the places are fewer than 1024 numbers.
    assert encoded == {f"blocks.{block}.{name}" for block in (0, 2) for name in matrices}
    groups = model._zeropg.flat_groups  # type: ignore[union-attr]
    assert {name for group in groups if group.is_encoded for (name, *_), *_ in group.slots} == encoded
    lines = [line for line in said.getvalue().splitlines() if "travel encoded" in line]
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(sizes[name] for name in encoded) / sum(sizes.values())
    assert all(f" {share:.1%} of the elements" in line for line in lines), lines


@on_ranks(2)
def test_a_plan_has_the_same_losses_in_stages_that_reduce_alike() -> None:
    batches = make_batches(6)
    plan = Plan(gradients=BlockQuant(4), exclude=("blocks.0.*",))
    losses = [train(*make_sharded(plan, stage), batches) for stage in STAGES]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
