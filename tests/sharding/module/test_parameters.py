"""What users see of the parameters of a sharded model: the same objects, and errors instead of wrong values."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, equal, on_ranks, raises
from tests.small_gpt import SmallGPT, loss_of, make_batches, make_model


def sharded(stage: int, **options: Any) -> SmallGPT:
    return zeropg.fully_shard(make_model(), stage=stage, **options)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_parameters_stay_the_same_objects(stage: int) -> None:
    model = make_model()
    model.place.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    facts = {name: (id(p), p.shape, p.stride(), p.dtype, p.requires_grad, p.is_leaf) for name, p in before.items()}
    keys = list(model.state_dict())
    assert zeropg.fully_shard(model, stage=stage) is model
    for _ in range(2):
        after = dict(model.named_parameters())
        assert facts == {
            name: (id(p), p.shape, p.stride(), p.dtype, p.requires_grad, p.is_leaf) for name, p in after.items()
        }
        assert all(isinstance(p, nn.Parameter) for p in after.values())
        assert list(model.state_dict()) == keys
        assert model.head.weight is model.embedding.weight
        loss_of(model, make_batches(1)[0]).backward()
        model.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_param_dtype_shows_in_the_parameter(stage: int) -> None:
    model = sharded(stage, param_dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor, _, _ in zeropg.local_shards(model)} == {torch.float32}
    assert model(make_batches(1)[0][:, :-1]).dtype == torch.bfloat16


@on_ranks(2)
def test_the_class_stays_the_users_own() -> None:
    model = sharded(3)
    assert isinstance(model, SmallGPT) and isinstance(model, zeropg.FullyShardedModule)
    assert isinstance(model.blocks[0], zeropg.FullyShardedModule)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), name) == getattr(SmallGPT, name)
    assert not isinstance(make_model(), zeropg.FullyShardedModule)
    assert isinstance(model.eval(), SmallGPT) and not model.blocks[0].training


READS = {
    "repr": repr,
    "str": str,
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "clone": lambda p: p.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "add": lambda p: p + 1,
    "inplace add": lambda p: p.data.add_(1),
    "fill": lambda p: p.data.zero_(),
    "copy_ from": lambda p: torch.empty_like(p.data).copy_(p.data),
    "copy_ to": lambda p: p.data.copy_(torch.zeros(p.shape)),
    "lerp": lambda p: torch.zeros(p.shape).lerp_(p.data, 0.5),
    "matmul": lambda p: p @ p.T,
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "embedding": lambda p: nn.functional.embedding(torch.zeros(1, dtype=torch.long), p),
    "norm": lambda p: p.norm(),
    "foreach norm": lambda p: torch._foreach_norm([p.detach()]),
    "equal": lambda p: torch.equal(p, torch.zeros(p.shape)),
    "allclose": lambda p: torch.allclose(p, torch.zeros(p.shape)),
    "isnan": lambda p: torch.isnan(p).any(),
    "to": lambda p: p.to(torch.float64),
    "bfloat16": lambda p: p.bfloat16(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "index": lambda p: p[torch.tensor([0])],
    "view and sum": lambda p: p.view(-1)[3:9].sum(),
    "contiguous transpose": lambda p: p.t().contiguous(),
    "data_ptr": lambda p: p.data_ptr(),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "uniform": lambda p: nn.init.uniform_(p),
    "send": lambda p: dist.all_reduce(p.detach()),
    "share": lambda p: p.detach().storage().share_memory_(),
}


@on_ranks(2)
def test_every_read_of_a_sharded_parameter_names_it_and_the_remedy() -> None:
    model = sharded(3)
    parameter = model.blocks[1].up.weight
    for _ in range(2):
        wrong = {}
        for what, read in READS.items():
            try:
                read(parameter)
                wrong[what] = "nothing raised"
            except Exception as error:
                if "'blocks.1.up.weight' is sharded" not in str(error) or "full_parameters" not in str(error):
                    wrong[what] = f"{type(error).__name__}: {error}"
        assert not wrong, wrong
        assert parameter.shape == (144, 36) and parameter.numel() == 144 * 36 and parameter.nbytes == 4 * 144 * 36
        loss_of(model, make_batches(1)[0]).backward()


@on_ranks(2)
def test_modules_of_a_sharded_model_can_be_printed_and_counted() -> None:
    model = sharded(3)
    assert "Linear(in_features=36" in repr(model)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in make_model().parameters())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_state_dict_is_local_and_live(stage: int) -> None:
    model = sharded(stage)
    if dist.get_rank() == 0:  # a collective would hang here
        state = model.state_dict()
        assert list(state) == list(make_model().state_dict())
        if stage == 3:
            with raises(RuntimeError, "'embedding.weight' is sharded", "full_parameters"):
                state["embedding.weight"].clone()
            with raises(RuntimeError, "is sharded", "full_parameters"):
                torch.save(state, io.BytesIO())
        else:
            assert all(equal(state[name], value) for name, value in make_model().state_dict().items())
            assert state["embedding.weight"].data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_load_state_dict_takes_whole_tensors(stage: int) -> None:
    model = sharded(stage)
    wanted = make_model(seed=7).state_dict()
    result = model.load_state_dict(wanted)
    assert not result.missing_keys and not result.unexpected_keys
    loaded = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(loaded[name], value) for name, value in wanted.items())
    reference = make_model(seed=7)
    batch = make_batches(1)[0]
    assert equal(loss_of(model, batch), loss_of(reference, batch))


CHANGES = {
    "replaced": lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(61, 36))),
    "deleted": lambda model: delattr(model.norm, "bias"),
    "resized embedding": lambda model: setattr(model, "embedding", nn.Embedding(70, 36)),
    "module replaced": lambda model: setattr(model.blocks[1], "up", nn.Linear(36, 144)),
    "module added": lambda model: model.blocks[1].add_module("adapter", nn.Linear(36, 2)),
    "parameter added": lambda model: model.norm.register_parameter("extra", nn.Parameter(torch.zeros(3))),
    "data replaced": lambda model: setattr(model.norm.weight, "data", torch.ones(37)),
}
CHANGED_NAMES = {
    "replaced": "head.weight",
    "deleted": "norm.bias",
    "resized embedding": "embedding.weight",
    "module replaced": "blocks.1.up.weight",
    "module added": "blocks.1.adapter.weight",
    "parameter added": "norm.extra",
    "data replaced": "norm.weight",
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_changed_parameters_are_named_at_the_next_forward(stage: int) -> None:
    batch = make_batches(1)[0]
    for what, change in CHANGES.items():
        model = sharded(stage)
        loss_of(model, batch).backward()
        change(model)
        with raises(RuntimeError, f"'{CHANGED_NAMES[what]}'", "before fully_shard"):
            model(batch[:, :-1])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_moved_models_are_noticed(stage: int) -> None:
    tokens = make_batches(1)[0][:, :-1]
    model = zeropg.fully_shard(make_model(), stage=stage)
    model(tokens)
    model.to("cpu")  # nothing to do, so nothing changes
    model(tokens)
    if stage == 3:
        with raises(RuntimeError, "is sharded", "full_parameters"):
            model.double()
    else:
        model.double()
        with raises(RuntimeError, "'embedding.weight'", "before fully_shard"):
            model(tokens)


class Meddler(nn.Module):
    """Writes to its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(2)
        return x @ self.weight


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_forward_may_write_to_its_own_parameters(stage: int) -> None:
    model = zeropg.fully_shard(Meddler(), stage=stage)
    for times in (1, 2):
        assert model(torch.ones(1, 8))[0, 0] == 8 * 2**times, "it sees what it wrote before"
    with zeropg.full_parameters(model):
        assert equal(model.weight.detach(), torch.full((8, 8), 4.0))


@on_ranks(2)
def test_writing_inside_full_parameters_that_only_read_raises() -> None:
    model = zeropg.fully_shard(Meddler(), stage=3)
    with zeropg.full_parameters(model), raises(RuntimeError, "write access to parameter 'weight'", "writable=True"):
        model.weight.data.zero_()
    with zeropg.full_parameters(model):
        assert equal(model.weight.detach(), torch.ones(8, 8))


class KeepsViews(nn.Module):
    """Made of its parameters once, as a plain model may have them: what steps write shows there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.turned = self.linear.weight.t()
        self.rows = {"last": [self.linear.weight.data[2]]}
        self.odd = nn.Parameter(torch.rand(3, 2).t())
        self.odd_row = self.odd.data[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned + (x @ self.rows["last"][0])[:, None] + self.linear(x)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=("zeropg", "gloo"))
def test_views_that_modules_keep_follow_their_parameters(stage: int) -> None:
    models = []
    for is_plain in (True, False):
        torch.manual_seed(1 if is_plain else 1 + dist.get_rank())
        model = nn.Sequential(KeepsViews())
        model = model if is_plain else zeropg.fully_shard(model, stage=stage, units=list(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = optimizer if is_plain else zeropg.shard_optimizer(optimizer, model)
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    found = zeropg.full_state_dict(models[1], rank0_only=False)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(found[name], value)
    with zeropg.full_parameters(models[1]), raises(RuntimeError, "'0.odd_row' was a view", "strides"):
        models[1][0].odd_row.sum()  # of a parameter that is contiguous only when it is sharded
    narrow = zeropg.fully_shard(KeepsViews(), stage=stage, param_dtype=torch.bfloat16)
    with raises(RuntimeError, "'turned' was a view", "another dtype"):
        narrow(torch.ones(2, 4))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_graph_from_before_a_step_cannot_be_used_after_it(stage: int) -> None:
    model = sharded(stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    batch = make_batches(1)[0]
    early = loss_of(model, batch)
    loss_of(model, batch).backward()
    optimizer.step()
    with raises(RuntimeError, "modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_copies_and_pickles_say_what_to_use_instead(stage: int) -> None:
    model = sharded(stage)
    for module in (model, model.blocks[0]):
        with raises(TypeError, "cannot be copied", "full_state_dict", "zeropg.ema(model)"):
            copy.deepcopy(module)
        with raises(TypeError, "cannot be pickled", "full_state_dict", "save_16bit_weights"):
            pickle.dumps(module)
        with raises(TypeError, "cannot be pickled"):
            torch.save(module, io.BytesIO())
