"""Optimizer state and masters in a tier: the same bits as in memory, in every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.memory import held_bytes
from tests.sharding.ranks import STAGES, equal, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model
from zeropg._native import _C
from zeropg.sharding import fully_shard

STEPS = 5
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95)),
    "adam with amsgrad": lambda groups: torch.optim.Adam(groups, lr=4e-3, weight_decay=0.01, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "lion": lambda groups: zeropg.optim.Lion(groups, lr=1e-3),
    "adamw in 16 bits": lambda groups: zeropg.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), state_bits=16),
    "adam in 8 bits": lambda groups: zeropg.optim.Adam(groups, lr=4e-3, weight_decay=0.01, state_bits=8),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
}
every_maker = pytest.mark.parametrize("maker", MAKERS)
every_stage = pytest.mark.parametrize("stage", STAGES)
BF16 = {"param_dtype": torch.bfloat16}


def on_disk(path: Path) -> zeropg.Offload:
    return zeropg.Offload(device="nvme", path=path, buffer_bytes=64 * 1024, threads=2)  # many chunks per flat


def set_up(maker: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    model = zeropg.fully_shard(make_model(dtype), **options)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 1e-2},
    ]
    original = MAKERS[maker](groups)
    return model, zeropg.shard_optimizer(original, model)


def train(model: nn.Module, optimizer: Any, steps: range = range(STEPS), accumulate: int = 1) -> list[float]:
    losses = []
    for step in steps:
        batch = make_batches(STEPS * 3)[step].chunk(dist.get_world_size())[dist.get_rank()]
        for part in batch.chunk(accumulate):
            loss = loss_of(model, part).float() / accumulate
            loss.backward()
            losses.append(loss.item())
        zeropg.clip_grad_norm_(model, 0.5)
        if step == 1:  # one block has no gradient, so the flat parameters' runs differ from now on
            for parameter in list(model.parameters())[5:8]:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return zeropg.full_state_dict(model, rank0_only=False)


def state_of(optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    """This rank's state by (name, key), joined from its pieces."""
    joined: dict[tuple[str, str], list[torch.Tensor]] = {}
    ends: dict[tuple[str, str], int] = {}
    for name, key, tensor, start, stop in optimizer.local_state():
        assert tensor.shape == (stop - start,)
        assert ends.get((name, key), start) == start, "pieces come in order"
        ends[name, key] = stop
        joined.setdefault((name, key), []).append(tensor.clone())
    return {place: torch.cat(pieces) for place, pieces in joined.items()} | {
        (name, key): torch.as_tensor(value) for name, key, value in optimizer.local_scalars()
    }


def assert_same(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [key for key in a if not equal(a[key], b[key])]


@every_maker
@every_stage
@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_tier_changes_no_bit(tmp_path: Path, maker: str, stage: int, options: dict[str, Any]) -> None:
    expected_model, expected = set_up(maker, stage=stage, **options)
    expected_losses = train(expected_model, expected)
    for offload in ("cpu", on_disk(tmp_path)):
        model, optimizer = set_up(maker, stage=stage, offload_optimizer=offload, **options)
        assert train(model, optimizer) == expected_losses
        assert_same(whole(model), whole(expected_model))
        assert_same(state_of(optimizer), state_of(expected))
    assert not list(tmp_path.iterdir())


def mixed(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return zeropg.optim.AdamW([{**groups[0], "state_bits": 8}, groups[1]], lr=4e-3)


@every_stage
@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_groups_whose_states_differ_in_size_share_masters(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    MAKERS["mixed"] = mixed
    expected_model, expected = set_up("mixed", stage=stage, **options)
    train(expected_model, expected)
    for buffer_bytes in (64 * 1024, 128 * 1024, 1024 * 1024):  # one chunk per flat parameter, two and more
        tier = zeropg.Offload(device="nvme", path=tmp_path, buffer_bytes=buffer_bytes, threads=2)
        model, optimizer = set_up("mixed", stage=stage, offload_optimizer=tier, **options)
        train(model, optimizer)
        assert_same(whole(model), whole(expected_model))
        assert_same(state_of(optimizer), state_of(expected))


@on_ranks(2)
def test_a_group_that_comes_later_shares_masters(tmp_path: Path) -> None:
    results = []
    for tier in (None, tmp_path):
        model = zeropg.fully_shard(make_model(), stage=2, offload_optimizer=tier, **BF16)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        optimizer = zeropg.shard_optimizer(torch.optim.AdamW(matrices, lr=1e-2), model)
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.ndim < 2]})
        train(model, optimizer, range(2, STEPS))
        results.append(whole(model))
    assert_same(*results)


@contextmanager
def host_tier() -> Iterator[None]:
    """What "cpu" means beside a GPU, on a CPU model: the step works on the tier's memory in place."""
    before = fully_shard.open_offload

    def make(*_: Any) -> Any:
        return _C.make_offload(
            device="cpu", directory="", threads=1, is_pinned=False, buffer_bytes=1 << 20, rank=0, world_size=1
        )

    fully_shard.open_offload = make
    try:
        yield
    finally:
        fully_shard.open_offload = before


@every_stage
@on_ranks(2)
def test_host_memory_is_used_in_place(stage: int) -> None:
    expected_model, expected = set_up("adamw", stage=stage, **BF16)
    with host_tier():
        model, optimizer = set_up("adamw", stage=stage, offload_optimizer="cpu", **BF16)
    assert train(model, optimizer) == train(expected_model, expected)
    assert_same(whole(model), whole(expected_model))
    assert_same(state_of(optimizer), state_of(expected))
    report = model._zeropg.memory_report()
    assert report["staging"] == report["masters"] == 0 < report["offloaded"]
    with zeropg.writable_shards(model) as shards:
        name, tensor, start, _ = shards[0]
        tensor += 1.0  # live
    assert equal(whole(model)[name].flatten()[start : start + len(tensor)], tensor) or dist.get_rank() > 0


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes(world_size: int, tmp_path: Path, rank_pool: Any) -> None:
    rank_pool(world_size).run(_accumulate_in_double, tmp_path)


def _accumulate_in_double(path: Path) -> None:
    torch.set_num_threads(1)
    for stage in (1, 3):
        runs = []
        for offload in (None, on_disk(path)):
            model, optimizer = set_up("adamw", torch.float64, stage=stage, offload_optimizer=offload)
            runs.append((train(model, optimizer, accumulate=2), whole(model)))
        assert runs[0][0] == runs[1][0]
        assert_same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, backend="gloo")
def test_over_gloo(tmp_path: Path, stage: int) -> None:
    expected_model, expected = set_up("adamw", stage=stage, **BF16)
    model, optimizer = set_up("adamw", stage=stage, offload_optimizer=on_disk(tmp_path), **BF16)
    assert train(model, optimizer) == train(expected_model, expected)
    assert_same(whole(model), whole(expected_model))


@every_stage
@on_ranks(2)
def test_masters_in_a_file_are_read_and_set_like_others(tmp_path: Path, stage: int) -> None:
    plain, plain_optimizer = set_up("adamw", stage=stage, **BF16)
    model, optimizer = set_up("adamw", stage=stage, offload_optimizer=on_disk(tmp_path), **BF16)
    both = ((plain, plain_optimizer), (model, optimizer))
    for each, its_optimizer in both:
        train(each, its_optimizer, range(2))
        with zeropg.full_parameters(each, writable=True):
            for parameter in each.parameters():
                parameter.data[..., ::3] += 0.25
    shards = [{(n, a, b): t.clone() for n, t, a, b in zeropg.local_shards(each)} for each, _ in both]
    assert_same(shards[0], shards[1])
    assert {t.dtype for t in shards[1].values()} == {torch.float32}
    assert_same(whole(model), whole(plain))
    assert train(model, optimizer, range(2, 4)) == train(plain, plain_optimizer, range(2, 4))
    values = {key: value + 1e-4 for key, value in whole(plain).items()}  # lost in bf16, kept in masters
    for each, _ in both:
        zeropg.load_full_state_dict(each, copy.deepcopy(values))
        assert_same(whole(each), {key: value.float() for key, value in values.items()})
    assert train(model, optimizer, range(4, 6)) == train(plain, plain_optimizer, range(4, 6))
    report = model._zeropg.memory_report()
    assert report["masters"] == 0
    assert report["offloaded"] >= 3 * plain._zeropg.memory_report()["masters"]


@every_maker
@on_ranks(2)
def test_state_moves_between_memory_and_a_file(tmp_path: Path, maker: str) -> None:
    """Through torch's state_dict, and piece by piece as checkpoints do; 16-bit masters through the full state dict."""
    expected_model, expected = set_up(maker, stage=2, **BF16)
    train(expected_model, expected, range(2))
    saved, values = copy.deepcopy(expected.state_dict()), whole(expected_model)
    scalars = list(expected.local_scalars())
    later = train(expected_model, expected, range(2, 4))
    from_file = None
    for offload, how in ((on_disk(tmp_path), "dict"), (on_disk(tmp_path), "pieces"), (None, "dict")):
        model, optimizer = set_up(maker, stage=2, offload_optimizer=offload, **BF16)
        train(model, optimizer, range(3, 5))  # something else was there before
        zeropg.load_full_state_dict(model, values)
        if how == "dict":
            optimizer.load_state_dict(saved if from_file is None else from_file)
        else:
            optimizer.load_local_state(_cut(saved, optimizer), scalars)
        again = optimizer.state_dict()
        for index, entries in saved["state"].items():
            assert_same(
                {k: v for k, v in again["state"].get(index, {}).items() if isinstance(v, torch.Tensor)},
                {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)},
            )
        from_file = copy.deepcopy(again)
        assert train(model, optimizer, range(2, 4)) == later
        assert_same(whole(model), whole(expected_model))


def _cut(saved: dict[str, Any], optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor, int, int]]:
    """The state of a state_dict in small pieces, last first."""
    names = {id(s.parameter): s.name for updater in optimizer._division.updaters for s in updater.segments}
    ranges = optimizer.local_ranges()
    numbers = enumerate(p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in numbers:
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                start, stop = ranges[names[id(parameter)]]
                for first in reversed(range(start, stop, 100)):
                    last = min(first + 100, stop)
                    yield names[id(parameter)], key, value[first - start : last - start], first, last


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * self.scale


@on_ranks(2)
def test_frozen_and_ignored_parameters_and_changing_options(tmp_path: Path) -> None:
    results = []
    for offload in (None, on_disk(tmp_path)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 70), nn.Linear(70, 3), Scale())
        model[2].requires_grad_(False)
        zeropg.fully_shard(model, stage=3, ignored_params=[model[4].scale], offload_optimizer=offload, **BF16)
        original = torch.optim.Adam([{"params": model[:4].parameters()}, {"params": model[4].parameters()}], lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(original, 0.5)
        optimizer = zeropg.shard_optimizer(original, model)
        for step in range(4):
            model(torch.ones(2, 8)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            assert step % 2 == 0 or not model[4].scale.grad.any()
            schedule.step()
            if step == 1:
                optimizer.param_groups[0]["amsgrad"] = True  # one more slot, in the middle of a run
        results.append(whole(model))
    assert_same(*results)


class Wide(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@on_ranks(2, timeout=120)
def test_memory_of_a_step_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """16 million parameters: 96 MiB of masters and moments per rank, of which memory sees the buffers only."""
    buffers = 4 << 20
    offload = zeropg.Offload(device="nvme", path=tmp_path, buffer_bytes=buffers)
    model = zeropg.fully_shard(Wide(16), stage=1, offload_optimizer=offload, **BF16)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(1, 1024)).float().sum().backward()
    before = held_bytes()
    peak = 0
    for _ in range(2):
        optimizer.step()
        peak = max(peak, held_bytes())
    report = model._zeropg.memory_report()
    assert report["offloaded"] == 3 * 4 * 16 * 1024 * 1024 // 2
    assert report["staging"] <= buffers
    assert report["masters"] == 0
    assert peak - before < 2 * buffers + (8 << 20), f"{(peak - before) >> 20} MiB"
    # Reading all state out passes through the same buffers.
    assert sum(tensor.numel() for _, _, tensor, _, _ in optimizer.local_state()) == 2 * 16 * 1024 * 1024 // 2
    assert held_bytes() - before < 2 * buffers + (8 << 20)


@on_ranks(1)
def test_the_plan_is_said_before_memory_is_taken(tmp_path: Path) -> None:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model, _ = set_up("adamw", stage=3, offload_optimizer=str(tmp_path), **BF16)
    text = said.getvalue()
    numel = sum(p.numel() for p in model.parameters())
    assert f"offload_optimizer: about {numel * 4 / 1024:.1f} KiB of masters per rank, to {tmp_path}" in text
    assert "shard_optimizer: 4" in text and "KiB of optimizer state per rank" in text
    with contextlib.redirect_stderr(said):
        set_up("adamw", stage=3, offload_optimizer=str(tmp_path))
    assert "no masters: parameters are their own" in said.getvalue()


@on_ranks(1)
def test_optimizers_without_a_kernel_are_refused_by_name(tmp_path: Path) -> None:
    model = zeropg.fully_shard(make_model(), offload_optimizer=tmp_path)
    with raises(
        NotImplementedError, "RMSprop keeps its state in memory", "use Adagrad, Adam, zeropg.optim.Adam, AdamW, "
    ):
        zeropg.shard_optimizer(torch.optim.RMSprop(model.parameters()), model)
    model = zeropg.fully_shard(make_model(), offload_optimizer="cpu", offload_params="cpu")
    zeropg.shard_optimizer(torch.optim.RMSprop(model.parameters()), model)


@on_ranks(1)
def test_arguments_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for value in ("nvme", "", 3, True):
        with raises(ValueError, "offload_optimizer is", "a directory on a local disk"):
            zeropg.fully_shard(make_model(), offload_optimizer=value)
    with raises(ValueError, "device is 'tape'"):
        zeropg.Offload(device="tape")  # type: ignore[arg-type]
    with raises(ValueError, "expected a directory"):
        zeropg.Offload(device="nvme")
    with raises(ValueError, "buffer_bytes is 1000"):
        zeropg.Offload(device="nvme", path=tmp_path, buffer_bytes=1000)
    with raises(NotImplementedError, "offload_params to", "offload_params='cpu' on a CPU model"):
        zeropg.fully_shard(make_model(), offload_params=tmp_path)


@on_ranks(2)
def test_checkpoints_move_between_memory_and_a_file(tmp_path: Path) -> None:
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    if dist.get_rank() == 0:
        disk.mkdir()
    dist.barrier()
    for source, target in ((None, on_disk(disk)), (on_disk(disk), None)):
        directory = saved / str(source is None)
        model, optimizer = set_up("adamw", stage=3, offload_optimizer=source, **BF16)
        train(model, optimizer, range(2))
        zeropg.save_checkpoint(directory, model, optimizer)
        again, resumed = set_up("adamw", stage=1, offload_optimizer=target, **BF16)
        zeropg.load_checkpoint(directory, again, resumed)
        assert_same(whole(again), whole(model))
        assert train(again, resumed, range(2, 4)) == train(model, optimizer, range(2, 4))
        assert_same(whole(again), whole(model))
