"""Whole parameters, local shards and state dicts: what goes in comes out, in every stage."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import BACKENDS, STAGES, close, equal, on_ranks, raises
from tests.small_gpt import SmallGPT, loss_of, make_batches, make_model

BF16 = torch.bfloat16


def sharded(stage: int, **options: Any) -> SmallGPT:
    return zeropg.fully_shard(make_model(), stage=stage, **options)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return zeropg.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_parameters_are_readable_inside_and_only_there(stage: int) -> None:
    model, plain = sharded(stage), make_model()
    with zeropg.full_parameters(model):
        for name, parameter in plain.named_parameters():
            assert equal(model.get_parameter(name).detach(), parameter.detach())
        with zeropg.full_parameters(model):  # nested
            assert equal(model.norm.weight.clone(), plain.norm.weight)
        assert equal(model.norm.weight.clone(), plain.norm.weight)
        batch = make_batches(1)[0]
        assert equal(loss_of(model, batch), loss_of(plain, batch))  # a forward inside
        assert equal(model.norm.weight.clone(), plain.norm.weight)
    if stage == 3:
        with raises(RuntimeError, "is sharded"):
            model.norm.weight.clone()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_is_written_inside_full_parameters_stays(stage: int) -> None:
    for options in ({}, {"param_dtype": BF16}):
        model = sharded(stage, **options)
        with zeropg.full_parameters(model, writable=True), torch.no_grad():
            model.norm.weight.fill_(1.5)
            model.blocks[0].up.weight[3:, ::2] = -2.0
            with zeropg.full_parameters(model, writable=True):
                model.head.weight.zero_()
        wanted = make_model().state_dict()
        wanted["norm.weight"].fill_(1.5)
        wanted["blocks.0.up.weight"][3:, ::2] = -2.0
        wanted["head.weight"].zero_()  # the embedding's too: they are tied
        found = masters(model)
        assert all(equal(found[name], wanted[name]) for name in wanted), "what was not written kept its fp32 value"
        with zeropg.full_parameters(model):
            assert all(equal(p.detach(), wanted[name].to(p.dtype)) for name, p in model.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_an_exception_inside_full_parameters_passes_through(stage: int) -> None:
    model = sharded(stage)
    with raises(KeyError, "mine"), zeropg.full_parameters(model, writable=True), torch.no_grad():
        model.norm.weight.fill_(3)
        raise KeyError("mine")
    assert equal(masters(model)["norm.weight"], torch.full((36,), 3.0))
    if stage == 3:
        with raises(RuntimeError, "is sharded"):
            model.norm.weight.clone()
    loss_of(model, make_batches(1)[0]).backward()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_steps_and_writes_are_refused_where_they_would_be_lost(stage: int) -> None:
    model = sharded(stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, make_batches(1)[0]).backward()
    with zeropg.full_parameters(model):
        with raises(RuntimeError, "full_parameters", "make the outer one writable"):
            zeropg.full_parameters(model, writable=True).__enter__()
        with raises(RuntimeError, "step", "inside full_parameters"):
            optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_arguments_that_differ_between_ranks_are_told_at_once(stage: int) -> None:
    model = sharded(stage)
    state, is_first = masters(model), dist.get_rank() == 0
    with raises(ValueError, "full_parameters: writable is 'True' on rank 0, but 'False' on rank 1"):
        zeropg.full_parameters(model, writable=is_first).__enter__()
    for argument in ("broadcast_from_rank0", "strict"):
        with raises(ValueError, f"load_full_state_dict: {argument} is 'True' on rank 0, but 'False' on rank 1"):
            zeropg.load_full_state_dict(model, state, **{argument: is_first})
    with raises(ValueError, "ema: decay is '0.5' on rank 0, but '0.75' on rank 1"):
        zeropg.ema(model, 0.5 if is_first else 0.75)
    assert all(equal(value, state[name]) for name, value in masters(model).items())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_a_forward_goes_on_after_it_has_read_all_parameters(stage: int) -> None:
    model, plain, batch = sharded(stage), make_model(), make_batches(1)[0]
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found: list[dict[str, torch.Tensor]] = []

    def look(*_: Any) -> None:
        with zeropg.full_parameters(model):
            found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        found.append(masters(model))
        if stage == 3:
            with raises(RuntimeError, "step: called inside a forward", "call it after"):
                optimizer.step()

    for module in (model.blocks[0], model.blocks[0].up, model.head):  # a unit, inside one, in the root
        module.register_forward_pre_hook(look)
    loss, wanted = loss_of(model, batch), loss_of(plain, batch)
    for one in (loss, wanted):
        one.backward()
    assert equal(loss, wanted) and len(found) == 6
    assert all(equal(each[name], p.detach()) for each in found for name, p in plain.named_parameters())
    with zeropg.full_gradients(model):
        assert all(close(model.get_parameter(name).grad, p.grad, 1e-5) for name, p in plain.named_parameters())
    optimizer.step()
    if stage == 3:
        with raises(RuntimeError, "is sharded"):
            model.blocks[0].up.weight.clone()


@pytest.mark.parametrize("world_size", [2, 3])
def test_local_shards_cover_everything_once(world_size: int, rank_pool: Any) -> None:
    for shards in zip(*rank_pool(world_size).run(collect_shards), strict=True):
        wanted = {name: p.detach().flatten() for name, p in make_model().named_parameters()}
        covered = {name: torch.zeros(p.numel(), dtype=torch.int) for name, p in wanted.items()}
        for per_rank in shards:
            for name, tensor, start, stop in per_rank:
                assert tensor.ndim == 1 and tensor.numel() == stop - start > 0
                assert equal(tensor, wanted[name][start:stop])
                covered[name][start:stop] += 1
        assert all((count == 1).all() for count in covered.values())


def collect_shards() -> list[list[tuple[str, torch.Tensor, int, int]]]:
    result = []
    for stage in STAGES:
        for options in ({}, {"param_dtype": BF16}):
            model = make_model()
            model.norm.requires_grad_(not options)  # frozen parameters are covered as well
            zeropg.fully_shard(model, stage=stage, **options)
            shards = [(name, t.float().clone(), *span) for name, t, *span in zeropg.local_shards(model)]
            result.append(shards)
    return result


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_local_shards_are_live(stage: int) -> None:
    model = sharded(stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    shards = {name: tensor for name, tensor, _, _ in zeropg.local_shards(model)}
    before = {name: tensor.clone() for name, tensor in shards.items()}
    loss_of(model, make_batches(1)[0]).backward()
    optimizer.step()
    whole = masters(model)
    for name, tensor, start, stop in zeropg.local_shards(model):
        assert equal(shards[name], tensor) and not equal(before[name], tensor)
        assert equal(tensor, whole[name].flatten()[start:stop])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_raw_pointers_may_be_read_and_what_is_written_counts(stage: int) -> None:
    for options in ({}, {"param_dtype": BF16}):
        model = sharded(stage, **options)
        wanted = masters(model)
        with zeropg.full_parameters(model):
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            found = torch.load(file)
            assert all(equal(found[name], p.detach()) for name, p in model.named_parameters())
            dist.broadcast(model.norm.weight.detach(), 0)
            model.norm.weight.detach().view(torch.uint8).numpy()[:] = 0
        wanted["norm.weight"] = torch.zeros(36)
        assert all(equal(value, wanted[name]) for name, value in masters(model).items())
        shards = list(zeropg.local_shards(model))
        for name, shard, start, stop in shards:
            assert shard.numpy().tolist() == wanted[name].flatten()[start:stop].tolist()
            if name == "norm.bias":
                shard.numpy()[:] = 5
        wanted["norm.bias"] = torch.full((36,), 5.0)
        assert all(equal(value, wanted[name]) for name, value in masters(model).items())
        for _, shard, *_ in shards:
            with raises(RuntimeError, "can only be read", "writable_shards"):
                shard.mul_(2)
        with zeropg.full_parameters(model):
            assert equal(model.norm.bias.detach().float(), wanted["norm.bias"])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_state_dict(stage: int) -> None:
    wanted = make_model().state_dict()
    for options in ({}, {"param_dtype": BF16}):
        model = sharded(stage, **options)
        state = zeropg.full_state_dict(model)
        if dist.get_rank() == 0:
            assert list(state) == list(wanted)
            assert all(equal(state[name], value) for name, value in wanted.items()), "fp32 masters are what is saved"
            assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
            state["norm.weight"].zero_()  # a copy
        else:
            assert state == {}
        assert equal(masters(model)["norm.weight"], torch.ones(36))
        half = zeropg.full_state_dict(model, dtype=BF16, rank0_only=False)
        assert all(equal(half[name], value.to(BF16)) for name, value in wanted.items())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_state_dict_casts_parameters_and_leaves_buffers_and_ignored_parameters(stage: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("positions", torch.tensor([100001.5, 1.0]))
    model.ignored = nn.Parameter(torch.tensor([100001.5]))
    zeropg.fully_shard(model, stage=stage, param_dtype=BF16, ignored_params=[model.ignored])
    half = zeropg.full_state_dict(model, dtype=torch.float16, rank0_only=False)
    assert half["weight"].dtype == half["bias"].dtype == torch.float16
    assert equal(half["positions"], torch.tensor([100001.5, 1.0]))
    assert equal(half["ignored"], torch.tensor([100001.5]))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_state_dict_has_what_hooks_make_of_a_module(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wanted = model[0].weight.detach().clone()

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")

    def double(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if stage < 3:
            state[prefix + "bias"] = 2 * state[prefix + "bias"].detach()

    model[0].register_state_dict_post_hook(rename)
    model[1].register_state_dict_post_hook(double)
    bias = model[1].bias.detach().clone()
    zeropg.fully_shard(model, stage=stage)
    state = zeropg.full_state_dict(model, rank0_only=False)
    assert "0.weight" not in state and equal(state["0.kernel"], wanted)
    assert equal(state["1.bias"], bias if stage == 3 else 2 * bias)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_names_to_gather_are_checked(stage: int) -> None:
    model = sharded(stage)
    with raises(ValueError, "full_state_dict", "only is or has 'norm.bias'; expected a collection"):
        zeropg.full_state_dict(model, only="norm.bias")
    with raises(ValueError, "only is or has 'norm.bais'"):
        zeropg.full_state_dict(model, only=["norm.bias", "norm.bais"])
    with raises(ValueError, "full_state_dict: only is", "ranks that differ: 1"):
        zeropg.full_state_dict(model, only=[("norm.bias", "norm.weight")[dist.get_rank()]])
    assert list(zeropg.full_state_dict(model, only=["norm.bias"], rank0_only=False)) == ["norm.bias"]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_load_full_state_dict_keeps_every_bit(stage: int) -> None:
    wanted = make_model(seed=7).state_dict()
    for options in ({}, {"param_dtype": BF16}):
        model = sharded(stage, **options)
        zeropg.load_full_state_dict(model, wanted if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
        assert all(equal(masters(model)[name], value) for name, value in wanted.items())
        with zeropg.full_parameters(model):
            assert all(equal(p.detach(), wanted[name].to(p.dtype)) for name, p in model.named_parameters())
        result = zeropg.load_full_state_dict(model, {"norm.weight": torch.full((36,), 0.1)}, strict=False)
        assert "norm.bias" in result.missing_keys and not result.unexpected_keys
        found = masters(model)
        assert equal(found.pop("norm.weight"), torch.full((36,), 0.1))
        assert all(equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_strict_loading_names_what_is_wrong(stage: int) -> None:
    model = sharded(stage)
    good = make_model(seed=7).state_dict()
    for broadcast in (False, True):
        missing = {name: value for name, value in good.items() if name != "norm.bias"}
        with raises(RuntimeError, "Missing key", '"norm.bias"'):
            zeropg.load_full_state_dict(model, missing, broadcast_from_rank0=broadcast)
        with raises(RuntimeError, "Unexpected key", '"stranger"'):
            zeropg.load_full_state_dict(model, good | {"stranger": torch.ones(1)}, broadcast_from_rank0=broadcast)
        with raises(RuntimeError, "size mismatch", "norm.weight"):
            zeropg.load_full_state_dict(model, good | {"norm.weight": torch.ones(7)}, broadcast_from_rank0=broadcast)
    with raises(NotImplementedError, "assign=True"):
        model.load_state_dict(good, assign=True)
    with raises(NotImplementedError, "unit of a sharded model", "load_full_state_dict"):
        model.blocks[0].load_state_dict({})
    zeropg.load_full_state_dict(model, good)
    assert equal(masters(model)["norm.bias"], good["norm.bias"])


@on_ranks(2)
def test_a_state_dict_of_another_stage_and_dtype_loads() -> None:
    state = masters(sharded(3, param_dtype=BF16))
    for stage in STAGES:
        model = zeropg.fully_shard(make_model(torch.float64, seed=7), stage=stage)
        model.load_state_dict(state)
        assert all(close(value, state[name]) for name, value in masters(model).items())


@on_ranks(2, backend="gloo")
def test_access_over_gloo() -> None:
    for stage in STAGES:
        for options in ({}, {"param_dtype": BF16}):
            model = sharded(stage, **options)
            with zeropg.full_parameters(model, writable=True), torch.no_grad():
                model.norm.weight.fill_(1.5)
            wanted = make_model().state_dict() | {"norm.weight": torch.full((36,), 1.5)}
            assert all(equal(masters(model)[name], value) for name, value in wanted.items())
            optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            batch = make_batches(1)[0]
            loss_of(model, batch).backward()
            loss_of(model, batch)  # leaves the root whole, which a step must notice
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
            plain = make_model()
            plain.load_state_dict(masters(model))
            assert close(loss_of(model, batch), loss_of(plain, batch), 1e-12 if not options else 1e-2)
