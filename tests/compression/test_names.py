"""Names of parameters: what a plan excludes by them, on every rank alike, and whose residuals a state loads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.spawn import RankPool, SeparateHosts, run_ranks
from zeropg import compression
from zeropg.compression import BlockQuant, OneBit, Plan, RandomK, State, TopK, ddp_hook


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.b(torch.tanh(self.a(x))))


def backward(state_of: Any) -> Two:
    model = Two()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state_of(model, ddp), ddp_hook)
    torch.manual_seed(dist.get_rank())
    ddp(torch.randn(8, 64)).square().sum().backward()
    return model


def is_encoded(parameter: nn.Parameter) -> bool:
    """One bit leaves one absolute value for each block."""
    assert parameter.grad is not None
    return len(parameter.grad.abs().unique()) < 100


def excludes(pattern: str, wrapped: bool) -> dict[str, bool]:
    plan = Plan(gradients=OneBit(), exclude=(pattern,))
    model = backward(lambda model, ddp: State(plan, model=ddp if wrapped else model))
    return {name: is_encoded(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("wrapped", [False, True])
def test_names_are_those_of_the_wrapped_module(rank_pool: Any, wrapped: bool) -> None:
    assert rank_pool(2).run(excludes, "a.*", wrapped) == [{"a.weight": False, "b.weight": True}] * 2


def error_of(exclude: tuple[str, ...], with_model: bool) -> str:
    plan = Plan(gradients=OneBit(), exclude=exclude)
    try:
        backward(lambda model, _: State(plan, model=model if with_model else None))
    except (ValueError, RuntimeError) as error:  # DDP makes a RuntimeError of it, with the words
        return str(error)
    return ""


def error_without_names() -> str:
    return error_of(("a.weight",), with_model=False)


def test_a_state_without_names_excludes_nothing_in_silence() -> None:
    for error in run_ranks(2, error_without_names):
        assert "pass the module that was wrapped: State(plan, model=model)" in error


def error_of_other_plans() -> str:
    return error_of((("a.weight",), ("b.weight",))[dist.get_rank()], with_model=True)


def test_ranks_with_other_plans_do_not_mix_gradients() -> None:
    for error in run_ranks(2, error_of_other_plans):
        assert "the plan is" in error and "pass the same on every rank" in error and "b.weight" in error


def say_plan(exclude: tuple[str, ...]) -> None:
    State(Plan(gradients=OneBit(), exclude=exclude), model=Two())


def test_a_pattern_that_matches_nothing_is_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    dist.init_process_group("zeropg", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        say_plan(("a.*", "c.*"))
    finally:
        dist.destroy_process_group()
    said = capfd.readouterr().err
    assert "no parameter's name matches exclude='c.*'" in said and "'a.*'" not in said.replace("Excluded: ", "")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.mid(x))


def gathered(exclude: tuple[str, ...]) -> dict[str, bool]:
    """Whether each weight of a nested FSDP2 model is gathered as it is."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = Nested()
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in exact.values():
        dist.broadcast(parameter, 0)
    model.load_state_dict(exact)
    seen = {}
    for name, layer in model.mid.named_children():
        fully_shard(layer)
        layer.register_forward_pre_hook(
            lambda layer, _, name=name: seen.update({f"mid.{name}.weight": layer.weight.detach().clone()})
        )
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            plan = Plan(weights=BlockQuant(8), exclude=exclude)
            module.set_custom_all_gather(compression.Fsdp2AllGather(plan, module))
    with torch.no_grad():
        model(torch.ones(2, 64))
    return {name: torch.equal(value, exact[name]) for name, value in seen.items()}


def test_fsdp2_excludes_by_names_in_the_whole_model(rank_pool: Any) -> None:
    wanted = {"mid.0.weight": True, "mid.1.weight": False}
    assert rank_pool(2).run(gathered, ("mid.0.weight",)) == [wanted] * 2
    assert rank_pool(2).run(gathered, ("mid.*",)) == [dict.fromkeys(wanted, True)] * 2


def save(folder: str) -> None:
    state = State(BlockQuant(4))
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(1000)
    whole = tensor.clone()
    dist.all_reduce(whole)
    compression.all_reduce(tensor, BlockQuant(4), state=state, name="x")
    torch.save((state.state_dict(), whole - tensor), Path(folder, f"rank{dist.get_rank()}"))


def share_that_arrives(folder: str) -> float:
    state, rank = State(BlockQuant(8)), dist.get_rank()
    lost = torch.load(Path(folder, "rank0"))[1]
    if rank < 2:
        state.load_state_dict(torch.load(Path(folder, f"rank{rank}"))[0])
    arrived = torch.zeros(1000)
    for _ in range(6):
        tensor = torch.zeros(1000)
        compression.all_reduce(tensor, BlockQuant(8), state=state, name="x")
        arrived += tensor
    return float(arrived.dot(lost) / lost.dot(lost))


def test_what_a_sum_has_lost_is_owed_once_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(2, save, str(tmp_path))
    for world_size in (2, 3):
        for share in run_ranks(world_size, share_that_arrives, str(tmp_path)):
            assert abs(share - 1) < 1e-3, (world_size, share)


def warnings_of_a_load() -> list[str]:
    codec = TopK(0.1)
    state = State(codec)
    compression.all_reduce(torch.randn(5000), codec, state=state, name="strange")
    saved = state.state_dict() | {"rank": 1 - dist.get_rank()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        State(codec, model=Two()).load_state_dict(saved)
    return [str(warning.message) for warning in caught]


def test_residuals_of_others_are_loaded_with_a_warning(rank_pool: Any) -> None:
    for rank, said in enumerate(rank_pool(2).run(warnings_of_a_load)):
        assert f"rank {rank} loads the residuals of rank {1 - rank}" in said[0]
        assert "has no parameters called strange" in said[1]


def few_of_many(ratio: float) -> bool:
    tensor = torch.ones(200_000)
    compression.all_reduce(tensor, RandomK(ratio))
    return bool(tensor.isfinite().all()) and 0 < int(tensor.count_nonzero()) <= 4 * 200_000 * ratio + 4


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2)])
def test_blocks_larger_than_a_chunk_travel_between_hosts(hosts: tuple[int, ...]) -> None:
    """A block of RandomK may have 32,768 elements: the planner divided by zero."""
    with RankPool(len(hosts), place=SeparateHosts(hosts=hosts)) as pool:
        for ratio in (2e-3, 1e-3, 5e-4, 3e-4, 1e-4, 5e-5):
            assert all(pool.run(few_of_many, ratio)), ratio
