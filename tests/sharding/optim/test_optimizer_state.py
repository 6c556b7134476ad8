"""State of a sharded optimizer: torch's layout, other ranks refused, what checkpoints read and write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharding.optim.fake_core import ranks_of, shard, whole_master
from tests.sharding.optim.test_shard_optimizer import assert_same, fill_gradients, make_model
from zeropg.optim import Lion
from zeropg.optim.saved_state import StateShard
from zeropg.optim.shard_optimizer import shard_optimizer

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "lion": lambda p: Lion(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        fill_gradients(model, step, skip=("2.bias",) if step == 0 else ())
        optimizer.step()


@every_maker
def test_state_dict_has_torchs_keys_and_local_shards(make: Any) -> None:
    plain = make_model()
    reference = make(plain.parameters())
    sharded = shard(copy.deepcopy(plain))
    optimizer = shard_optimizer(make(sharded.parameters()), sharded)
    steps(plain, reference, 0, 3)
    steps(sharded, optimizer, 0, 3)
    expected, ours = reference.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == expected["param_groups"]
    assert ours["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert ours["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            got = ours["state"][index][key]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(got, value.flatten() if value.dim() else value, rtol=1e-13, atol=1e-15)
                assert got.dtype == value.dtype
            else:
                assert got == value


@every_maker
def test_a_run_continues_from_its_state_dict(make: Any) -> None:
    models = ranks_of(make_model(), 3)
    model = models[1]
    optimizer = shard_optimizer(make(model.parameters()), model)
    steps(model, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    masters = model._zeropg.flat_groups[0].master.clone()  # type: ignore
    steps(model, optimizer, 3, 6)
    expected = model._zeropg.flat_groups[0].master.clone()  # type: ignore

    again = ranks_of(make_model(), 3)[1]
    resumed = shard_optimizer(make(again.parameters()), again)
    steps(again, resumed, 7, 9)
    again._zeropg.flat_groups[0].master.copy_(masters)  # type: ignore
    resumed.load_state_dict(saved)
    steps(again, resumed, 3, 6)
    assert again._zeropg.flat_groups[0].master.equal(expected)  # type: ignore


def put_before(optimizer: torch.optim.Optimizer, sums: list[torch.Tensor]) -> None:
    """Into torch's optimizer, or into what `shard_optimizer` shows of it."""
    for entries, value in zip(optimizer.state.values(), sums, strict=True):
        entries["sum"].copy_(value.view(entries["sum"].shape))


def put_by_loading(optimizer: torch.optim.Optimizer, sums: list[torch.Tensor]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    saved.pop("zeropg", None)
    for entries, value in zip(saved["state"].values(), sums, strict=True):
        entries["sum"] = value
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("when", ["before shard_optimizer", "after it", "loaded"])
def test_a_sum_of_adagrad_counts_that_was_there_before_the_first_step(when: str) -> None:
    plain = make_model()
    model = shard(copy.deepcopy(plain))
    sums = [torch.full_like(parameter, 0.5 + index) for index, parameter in enumerate(plain.parameters())]
    reference, original = MAKERS["adagrad"](plain.parameters()), MAKERS["adagrad"](model.parameters())
    put_before(reference, sums)
    if when == "before shard_optimizer":
        put_before(original, sums)
    optimizer = shard_optimizer(original, model)
    if when == "after it":
        put_before(optimizer, sums)
    if when == "loaded":
        put_by_loading(optimizer, sums)
    steps(plain, reference, 0, 3)  # one parameter has its first step later
    steps(model, optimizer, 0, 3)
    assert_same(model, plain)


def test_adagrads_initial_value_counts_where_there_is_no_state() -> None:
    plain = make_model()
    model = shard(copy.deepcopy(plain))
    reference = MAKERS["adagrad"](plain.parameters())
    optimizer = shard_optimizer(MAKERS["adagrad"](model.parameters()), model)
    optimizer.param_groups[0]["initial_accumulator_value"] = 7.0  # torch reads it when the optimizer is made
    optimizer.state.pop(model[0].bias)
    reference.state[plain[0].bias]["sum"].fill_(7.0)
    steps(plain, reference, 0, 3)
    steps(model, optimizer, 0, 3)
    assert_same(model, plain)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 3), (0, 4)])
def test_state_of_another_rank_or_world_is_refused(rank: int, world_size: int) -> None:
    optimizers = []
    for place in ((1, 2), (rank, world_size)):
        model = shard(make_model(), *place)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        steps(model, optimizer, 0, 1)
        optimizers.append(optimizer)
    with pytest.raises(ValueError, match=rf"\[zeropg rank {rank}/{world_size}\].*rank 1/2; use zeropg.load_checkpoint"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


@every_maker
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("how", ["held by the optimizer", "loaded afterwards"])
def test_state_of_a_plain_torch_optimizer_is_cut_up(make: Any, world_size: int, how: str) -> None:
    plain = make_model()
    reference = make(plain.parameters())
    steps(plain, reference, 0, 3)
    ranks = []
    for rank in range(world_size):
        model, original = copy.deepcopy((plain, reference))
        if how == "loaded afterwards":
            original = make(model.parameters())
        optimizer = shard_optimizer(original, shard(model, rank, world_size))
        if how == "loaded afterwards":
            optimizer.load_state_dict(reference.state_dict())
        steps(model, optimizer, 3, 5)
        ranks.append(model)
    steps(plain, reference, 3, 5)
    torch.testing.assert_close(whole_master(ranks), whole_master(ranks_of(plain, world_size)), rtol=1e-12, atol=1e-14)


@every_maker
def test_local_state_moves_to_another_world_size(make: Any) -> None:
    """What a checkpoint does: collect from all ranks by name and range, hand each new rank its ranges."""
    old = ranks_of(make_model(), 3)
    whole: dict[str, dict[str, Any]] = {}
    for model in old:
        optimizer = shard_optimizer(make(model.parameters()), model)
        steps(model, optimizer, 0, 3)
        for name, key, value in optimizer.local_scalars():  # type: ignore[attr-defined]
            whole.setdefault(name, {})[key] = value
        for name, key, tensor, start, stop in optimizer.local_state():  # type: ignore[attr-defined]
            numel = dict(model.named_parameters())[name].numel()
            entry = whole.setdefault(name, {}).setdefault(key, torch.full((numel,), torch.nan, dtype=tensor.dtype))
            entry[start:stop] = tensor
        steps(model, optimizer, 3, 5)
    assert not any(t.isnan().any() for s in whole.values() for t in s.values() if isinstance(t, torch.Tensor))

    start_values = make_model()
    trained = ranks_of(start_values, 3)
    for model in trained:
        steps(model, shard_optimizer(make(model.parameters()), model), 0, 3)
    masters = whole_master(trained)
    new = ranks_of(start_values, 2)
    for rank, model in enumerate(new):
        flat = model._zeropg.flat_groups[0]  # type: ignore
        numel = len(flat.master)
        used = masters[rank * numel : (rank + 1) * numel]
        flat.master[: len(used)] = used
        optimizer = shard_optimizer(make(model.parameters()), model)
        optimizer.load_local_state(*whole_state(whole))  # type: ignore[attr-defined]
        steps(model, optimizer, 3, 5)
    expected, got = whole_master(old), whole_master(new)
    used = min(len(expected), len(got))
    torch.testing.assert_close(got[:used], expected[:used], rtol=1e-14, atol=1e-15)


def whole_state(whole: dict[str, dict[str, Any]]) -> tuple[list[StateShard], list[tuple[str, str, Any]]]:
    """What a checkpoint hands over: pieces that know nothing of this rank's ranges, and numbers."""
    pieces, numbers = [], []
    for name, entries in whole.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim():
                for start in reversed(range(0, len(value), 50)):
                    piece = value[start : start + 50]
                    pieces.append(StateShard(name, key, piece, start, start + len(piece)))
            else:
                numbers.append((name, key, value))
    return pieces, numbers


@every_maker
def test_loading_what_was_read_changes_nothing(make: Any) -> None:
    model = ranks_of(make_model(), 3)[1]
    optimizer = shard_optimizer(make(model.parameters()), model)
    steps(model, optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    pieces = [StateShard(*s[:2], s.tensor.clone(), *s[3:]) for s in optimizer.local_state()]  # type: ignore[attr-defined]
    optimizer.load_local_state(pieces, list(optimizer.local_scalars()))  # type: ignore[attr-defined]
    after = optimizer.state_dict()["state"]
    assert after.keys() == before.keys()
    for index, entries in before.items():
        assert after[index].keys() == entries.keys()
        assert all(torch.equal(torch.as_tensor(after[index][k]), torch.as_tensor(entries[k])) for k in entries)


def test_pieces_that_leave_elements_out_are_refused_and_leave_no_state() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    steps(model, optimizer, 0, 1)
    pieces = [StateShard("0.bias", "exp_avg", torch.ones(10), 0, 10)]
    with pytest.raises(ValueError, match=r"exp_avg of 0\.bias miss the elements of this rank by 7"):
        optimizer.load_local_state(pieces)  # type: ignore[attr-defined]
    assert not optimizer.state and not list(optimizer.local_state())  # type: ignore[attr-defined]


def test_stage_0_saves_each_element_on_one_rank() -> None:
    models = ranks_of(make_model(), 3, stage=0)
    covered: dict[str, list[int]] = {}
    for model in models:
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        steps(model, optimizer, 1, 2)
        for name, key, tensor, start, stop in optimizer.local_state():  # type: ignore[attr-defined]
            assert tensor.equal(optimizer.state[dict(model.named_parameters())[name]][key][start:stop])
            if key == "exp_avg":
                covered.setdefault(name, []).extend(range(start, stop))
        assert optimizer.local_ranges()["0.weight"] == (0, 9 * 17)  # type: ignore[attr-defined]
    for name, parameter in models[0].named_parameters():
        assert sorted(covered[name]) == list(range(parameter.numel()))


def test_state_of_another_optimizer_class_is_refused_by_name() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9), model)
    other = shard(make_model())
    adamw = shard_optimizer(torch.optim.AdamW(other.parameters()), other)
    steps(other, adamw, 0, 1)
    saved = adamw.state_dict()
    saved["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=r"0\.weight has \['exp_avg'\], but sgd .* \['momentum_buffer'\]"):
        optimizer.load_state_dict(saved)


def test_state_of_other_groups_is_refused() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters()), model)
    other = make_model()
    saved = torch.optim.SGD([{"params": other[0].parameters()}, {"params": other[2].parameters()}]).state_dict()
    with pytest.raises(ValueError, match=r"param groups of sizes \[2, 2\], expected \[6\]"):
        optimizer.load_state_dict(saved)


def test_a_tensor_of_the_wrong_length_is_refused() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    with pytest.raises(ValueError, match=r"exp_avg of 0.bias has shape \[4\], expected \[17\]"):
        optimizer.load_local_state([StateShard("0.bias", "exp_avg", torch.zeros(4), 0, 17)])  # type: ignore[attr-defined]


def test_state_dict_hooks_run() -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda *args: seen.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *args: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "before", "after"]


def test_parameters_and_state_survive_a_round_trip_of_torch_save(tmp_path: Any) -> None:
    model = shard(make_model())
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    steps(model, optimizer, 0, 2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    other = make_model()
    other.load_state_dict(twin)
    shard(other)
    resumed = shard_optimizer(torch.optim.AdamW(other.parameters(), lr=0.5), other)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(model, optimizer, 2, 4)
    steps(other, resumed, 2, 4)
    assert_same(other, model, relative=0, of_largest=0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_loading_its_own_live_state_dict_changes_nothing(kind: Any) -> None:
    """As in plain torch; its tensors are views of what loading replaces."""
    models = [shard(make_model()) for _ in range(2)]
    optimizers = [shard_optimizer(kind(model.parameters(), lr=0.1), model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, 0, 2)
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, 2, 4)
    assert_same(models[0], models[1], relative=0, of_largest=0)
