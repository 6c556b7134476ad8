"""How models are built: in zero.Init, nested, by classes of any kind, with modules that come late, and leaf modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.upstream.reference import ROWS, assert_same, engine_over, gradients, rows, weights
from tests.deepspeed.upstream.test_user_backward import WIDTH, Stack, sum_of_squares
from tests.sharding.ranks import STAGES, on_ranks, raises


class Base(nn.Linear):
    """A parameter that the base class makes and the subclass changes while it is built."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        with torch.no_grad():
            self.weight.zero_()


class Derived(Base):
    def __init__(self) -> None:
        super().__init__()
        from zeropg import deepspeed

        with deepspeed.zero.GatheredParameters(self.weight, modifier_rank=0), torch.no_grad():
            self.weight.add_(1)
        self.apply(set_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def set_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.bias, 0.5)


@on_ranks(2, timeout=120)
def test_what_constructors_and_apply_write_counts() -> None:
    from zeropg import deepspeed

    for stage in STAGES:
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 8}):
            model = Derived()
        engine = engine_over(model, stage)
        found = weights(engine)
        assert (found["weight"] == 1).all() and (found["bias"] == 0.5).all() and (found["scale"] == 1).all()
        sum_of_squares(engine)
        engine.step()
        assert engine.was_step_applied()


@on_ranks(2, timeout=120)
def test_init_nests_and_classes_may_be_declared_inside() -> None:
    from zeropg import deepspeed

    with deepspeed.zero.Init():
        with deepspeed.zero.Init():

            class Declared(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    with deepspeed.zero.Init(enabled=False):
                        self.inner = nn.Linear(WIDTH, WIDTH)

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.inner(x)  # type: ignore[no-any-return]

            first = Declared()
        second = Declared()
    third = Declared()
    for model in (first, second, third):
        engine = engine_over(model, 3)
        sum_of_squares(engine)
        engine.step()
        assert engine.was_step_applied()
    assert nn.Linear(2, 2).weight.shape == (2, 2), "torch is as it was"


class Borrowing(nn.Module):
    """Uses another module's parameter, and one that a module gives out of its forward."""

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"x": self.layer(x), "bias": self.layer.bias}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.giving = self.Giving()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from zeropg import deepspeed

        deepspeed.zero.register_external_parameter(self, self.giving.layer.weight)
        given = self.giving(x)
        return self.last(nn.functional.linear(given["x"], self.giving.layer.weight)) + given["bias"]


@on_ranks(2, timeout=120)
def test_parameters_of_other_modules_may_be_used() -> None:
    found = []
    for stage in STAGES:
        engine = engine_over(Borrowing(), stage)
        sum_of_squares(engine)
        found.append(gradients(engine))
        engine.step()
    for others in found[1:]:
        assert_same(others, found[0])


@on_ranks(2, timeout=120)
def test_a_module_that_comes_late_is_named() -> None:
    for stage in STAGES:
        engine = engine_over(Stack(), stage)
        sum_of_squares(engine)
        engine.step()
        engine.module.late = nn.Linear(WIDTH, WIDTH)
        with raises(RuntimeError, "late.weight", "before fully_shard"):
            sum_of_squares(engine)
        del engine.module.late
        sum_of_squares(engine)
        engine.step()
        assert engine.was_step_applied()
        engine.module.note = nn.Identity()  # has no parameters
        sum_of_squares(engine)
        engine.step()


@on_ranks(2, timeout=120)
def test_one_rank_writes_gathered_parameters_and_all_have_it() -> None:
    from zeropg import deepspeed

    for stage in STAGES:
        engine = engine_over(Stack(), stage)
        weight = engine.module.last.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
            if dist.get_rank() == 1:
                weight.fill_(3.0)
        assert (weights(engine)["last.weight"] == 3).all()
        with deepspeed.zero.GatheredParameters(weight):
            assert weight.shape == (WIDTH, WIDTH) and float(weight.detach().sum()) == 3 * WIDTH * WIDTH


class Experts(nn.Module):
    """One of two experts, chosen by rank or by a count: ranks of a node may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.count = 0

    def forward(self, x: torch.Tensor, by_rank: bool) -> torch.Tensor:
        self.count += 1
        chosen = dist.get_rank() if by_rank else self.count % 2
        return self.experts[chosen](x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixed = Experts()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, by_rank: bool) -> torch.Tensor:
        return self.last(self.mixed(self.first(x), by_rank))  # type: ignore[no-any-return]


class Special(Experts):
    pass


@on_ranks(2, backend=("zeropg", "gloo"), timeout=120)
def test_experts_that_ranks_choose_are_whole_as_a_leaf() -> None:
    from zeropg.deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules

    found = []
    for stage in STAGES:
        model = Mixture()
        assert set_z3_leaf_modules(model, [Experts]) == [model.mixed] == get_z3_leaf_modules(model)
        unset_z3_leaf_modules(model, [Experts])
        assert get_z3_leaf_modules(model) == []
        set_z3_leaf_modules(model, [f"{Experts.__module__}.Experts"])
        engine = engine_over(model, stage)
        for by_rank in (True, False, True):
            engine.backward(engine(rows(ROWS, WIDTH), by_rank).square().mean())
            engine.step()
        found.append(weights(engine))
    for others in found[1:]:
        assert_same(others, found[0])
    model.mixed = Special()  # a subclass is one, too
    assert set_z3_leaf_modules(model, [Experts]) == [model.mixed]
    with raises(ValueError, "has no module of", "Conv2d"):
        set_z3_leaf_modules(Mixture(), [nn.Conv2d])
    assert set_z3_leaf_modules(Mixture(), [nn.Conv2d], raise_if_not_found=False) == []


@on_ranks(2, timeout=120)
def test_leaf_modules_are_marked_by_name_and_by_the_end_of_it() -> None:
    from zeropg.deepspeed import utils

    model = Mixture()
    assert utils.set_z3_leaf_modules_by_name(model, ["mixed"]) == ([model.mixed], [])
    with raises(ValueError, "has no module 'missing'"):
        utils.set_z3_leaf_modules_by_name(model, ["first", "missing"])
    assert not utils.z3_leaf_module(model.first), "nothing was marked"
    found = utils.set_z3_leaf_modules_by_name(model, ["first", "missing"], raise_if_not_found=False)
    assert found == ([model.first], ["missing"])
    utils.set_z3_leaf_modules_by_name(model, ["first"], flag=False)
    found = utils.set_z3_leaf_modules_by_suffix(model, ["st", "nowhere"], raise_if_not_found=False)
    assert found == ([model.first, model.last], ["nowhere"])
    utils.set_z3_leaf_modules_by_suffix(model, ["st"], flag=False)
    with raises(ValueError, "has no module 'nowhere'"):
        utils.set_z3_leaf_modules_by_suffix(model, ["nowhere"])
    assert utils.get_z3_leaf_modules(model) == [model.mixed]
    engine = engine_over(model, 3)
    marked = {name for name, parameter in engine.module.named_parameters() if utils.z3_leaf_parameter(parameter)}
    assert marked == {name for name, _ in model.named_parameters() if name.startswith("mixed.")}


@on_ranks(2, timeout=120)
def test_leaf_modules_of_the_configuration() -> None:
    from zeropg.deepspeed.utils import get_z3_leaf_modules

    for block in ({"classes": ["Experts"]}, {"names": ["mixed"]}, {"name_suffixes": ["xed"]}, {"names": ["missing"]}):
        engine = engine_over(Mixture(), 3, zero_optimization={"stage": 3, "leaf_module": block})
        expected = [] if block == {"names": ["missing"]} else [engine.module.mixed]
        assert get_z3_leaf_modules(engine.module) == expected
        engine.backward(engine(rows(ROWS, WIDTH), True).square().mean())
        engine.step()
        assert engine.was_step_applied()
    container = {"stage": 3, "leaf_module": {"names": ["mixed.experts"]}}
    with raises(ValueError, "'mixed.experts' is a ModuleList", "no forward", "module that contains it"):
        engine_over(Mixture(), 3, zero_optimization=container)
