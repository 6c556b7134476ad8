"""FSDP2 with compressed gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.optim import AdamW

from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import SmallGPT, loss_of, make_batches, make_model
from zeropg.compression import BlockQuant, Codec, Fsdp2AllGather, Fsdp2ReduceScatter, OneBit, Plan, State
from zeropg.compression.state import ARREARS_HOP, CONTRIBUTION_HOP


def make_sharded(codec: Codec | None, policy: MixedPrecisionPolicy | None = None) -> tuple[SmallGPT, list[FSDPModule]]:
    model = make_model()
    options = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fsdp2(block, **options)
    fsdp2(model, **options)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if codec is not None:
        for module in modules:
            module.set_custom_reduce_scatter(Fsdp2ReduceScatter(codec))
    return model, modules


def train(model: SmallGPT, steps: int = 20) -> list[float]:
    optimizer = AdamW(model.parameters(), lr=4e-3)
    losses = []
    for batch in make_batches(steps):
        loss = loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    return losses


@pytest.mark.parametrize(("codec", "tolerance"), [(BlockQuant(8), 0.02), (BlockQuant(4), 0.08)], ids=str)
@on_ranks(2)
def test_fsdp2_learns_as_without_compression(codec: Codec, tolerance: float) -> None:
    expected = train(make_sharded(None)[0])
    losses = train(make_sharded(codec)[0])
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=tolerance), (losses, expected)
    assert losses[-1] < 0.8 * losses[0]


@on_ranks(2)
def test_gradients_in_16_bits_are_taken_as_those_in_fp32() -> None:
    for reduce_dtype in (torch.bfloat16, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        losses = train(make_sharded(BlockQuant(4), policy)[0], 10)
        assert losses[-1] < losses[0], reduce_dtype


def make_stateful() -> tuple[SmallGPT, State]:
    model, modules = make_sharded(None)
    state = State(BlockQuant(4), model=model)
    for module in modules:
        module.set_custom_reduce_scatter(Fsdp2ReduceScatter(state, module))
    return model, state


def gradients(model: SmallGPT, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    return torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])


def pending(model: SmallGPT, state: State) -> torch.Tensor:
    """What all ranks have lost so far and still owe, in the order of `gradients`."""
    owed = {name: torch.zeros(parameter.numel()) for name, parameter in model.named_parameters()}
    for name, hop, start, values in state.state_dict()["residuals"]:
        target = owed[name][start : start + len(values)]  # beyond its end: what FSDP2 pads with
        assert hop in (CONTRIBUTION_HOP, ARREARS_HOP) and not values[len(target) :].any()
        target += values[: len(target)]
    total = torch.cat(list(owed.values()))
    dist.all_reduce(total)
    return total


def save_residuals(folder: Path) -> torch.Tensor:
    """The gradients of the fourth step, with what three have left."""
    batches = make_batches(4)
    model, state = make_stateful()
    for batch in batches[:3]:
        gradients(model, batch)
    torch.save(state.state_dict(), folder / f"rank{dist.get_rank()}")
    return gradients(model, batches[3])


def load_residuals(folder: Path | None) -> torch.Tensor:
    model, state = make_stateful()
    file = folder and folder / f"rank{dist.get_rank()}"
    if file and file.exists():
        state.load_state_dict(torch.load(file))
    batch, world_size = make_batches(4)[3], dist.get_world_size()
    before = pending(model, state)
    assert before.any() == (folder is not None)
    found = gradients(model, batch)
    # Nothing is lost: what arrived and what is pending is what there was and what went in.
    plain = gradients(make_sharded(None)[0], batch)
    assert not torch.allclose(found, plain, rtol=0, atol=1e-6)
    arrived = world_size * found + pending(model, state)
    torch.testing.assert_close(arrived, world_size * plain + before, rtol=0, atol=1e-6)
    return found


def test_residuals_belong_to_elements_of_parameters(rank_pool: Any, tmp_path: Path) -> None:
    """Saved and loaded they give the same gradients to the bit; another world cuts them in other places."""
    saved = rank_pool(2).run(save_residuals, tmp_path)[0]
    assert torch.equal(rank_pool(2).run(load_residuals, tmp_path)[0], saved)
    assert not torch.equal(rank_pool(2).run(load_residuals, None)[0], saved)
    rank_pool(3).run(load_residuals, tmp_path)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).square().mean() for name in names)


@on_ranks(2)
def test_steps_without_some_gradients_keep_and_use_no_residuals() -> None:
    model = fsdp2(Two())
    state = State(BlockQuant(4), model=model)
    model.set_custom_reduce_scatter(Fsdp2ReduceScatter(state, model))
    model(torch.randn(8, 64), "ab").backward()
    before = state.state_dict()["residuals"]
    assert {name for name, *_ in before} == {"a.weight", "b.weight"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for names in "aba":
            model(torch.randn(8, 64), names).backward()
    assert [str(each.message) for each in said if "without error feedback" in str(each.message)] == [
        "of a.weight, b.weight some got no gradient: such steps do without error feedback"
    ]
    after = state.state_dict()["residuals"]
    assert all(torch.equal(x[3], y[3]) for x, y in zip(before, after, strict=True))
    model(torch.randn(8, 64), "ab").backward()
    assert not torch.equal(before[0][3], state.state_dict()["residuals"][0][3])


@on_ranks(2)
def test_a_matrix_cut_in_columns_has_residuals_for_this_world_size_only() -> None:
    model = nn.Linear(64, 64)
    fsdp2(model, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    state = State(BlockQuant(4), model=model)
    model.set_custom_reduce_scatter(Fsdp2ReduceScatter(state, model))
    model(torch.randn(8, 64)).square().mean().backward()
    assert {name for name, *_ in state.state_dict()["residuals"]} == {"weight in 2 parts of dimension 1"}


@on_ranks(2)
def test_bad_use_is_named() -> None:
    before = State(BlockQuant(4), model=(plain := make_model()))
    module = fsdp2(plain)
    with raises(ValueError, "no such parameter", "after fully_shard"):
        Fsdp2ReduceScatter(before, module)
    with raises(TypeError, "belong together"):
        Fsdp2ReduceScatter(before)
    with raises(TypeError, "belong together"):
        Fsdp2ReduceScatter(BlockQuant(4), module)
    with raises(TypeError, "expected a codec such as"):
        Fsdp2ReduceScatter(BlockQuant)


def encode_weights(modules: list[FSDPModule], codec: Codec | Plan) -> None:
    for module in modules:
        module.set_custom_all_gather(Fsdp2AllGather(codec, module))


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
@on_ranks(2)
def test_fsdp2_computes_with_decoded_weights_and_keeps_exact_shards(policy: MixedPrecisionPolicy | None) -> None:
    expected = train(make_sharded(None, policy)[0])
    model, modules = make_sharded(BlockQuant(4), policy)
    encode_weights(modules, BlockQuant(8))
    losses = train(model)
    assert losses[-1] == pytest.approx(expected[-1], rel=0.08), (losses, expected)
    exact = {name: parameter.full_tensor() for name, parameter in model.blocks[0].named_parameters()}
    block = model.blocks[0]
    block.unshard()
    for name, parameter in block.named_parameters():
        away = (parameter.float() - exact[name]).abs().max()
        assert away <= 0.01 * exact[name].abs().max(), name
        if policy is None:
            assert (away == 0) == (parameter.dim() == 1), name
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter), name
    block.reshard()
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.full_tensor(), exact[name]), name


@on_ranks(2)
def test_fsdp2_gathers_what_it_lays_out_in_another_way_as_it_is() -> None:
    model = make_model()
    model.norm.bfloat16().requires_grad_(False)  # two dtypes travel as bytes
    fsdp2(model)
    encode_weights([model], BlockQuant(8))
    expected = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    model.unshard()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@on_ranks(2)
def test_codecs_that_are_too_coarse_for_weights_are_refused() -> None:
    _, modules = make_sharded(None)
    with raises(ValueError, "too coarse", "BlockQuant(8)"):
        Fsdp2AllGather(OneBit(), modules[0])
    with raises(ValueError, "no codec for weights"):
        Fsdp2AllGather(Plan(gradients=BlockQuant(4)), modules[0])
    with raises(TypeError, "expected a codec"):
        Fsdp2AllGather(4, modules[0])  # type: ignore[arg-type]
