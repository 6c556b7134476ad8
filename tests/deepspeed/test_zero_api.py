"""DeepSpeed's zero and utils: building a model, one parameter's values of every kind, leaf modules."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.training import STAGES, batches, configuration, make_engine, own_parts, shared_folder, train
from tests.sharding.ranks import close, on_ranks, raises
from tests.small_gpt import loss_of, make_model, make_optimizer
from zeropg.deepspeed.zero.leaf_modules import mark_cut


def reference(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain model and optimizer after some steps, with the next step's gradients in place."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(steps + 1):
        loss_of(model, batches()[step]).backward()
        if step < steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


@on_ranks(2, timeout=120)
def test_one_parameter_is_read_and_written_in_every_stage() -> None:
    from zeropg.deepspeed import utils

    plain, optimizer = reference(2)
    key = "blocks.1.up.weight"
    expected = plain.get_parameter(key)
    for stage in STAGES:
        engine = make_engine(stage)
        param = engine.module.get_parameter(key)
        train(engine, batches()[:2])
        assert close(utils.safe_get_full_fp32_param(param), expected.detach(), 1e-5)
        for name in ("exp_avg", "exp_avg_sq"):
            state = utils.safe_get_full_optimizer_state(param, name)
            assert close(state, optimizer.state[expected][name], 1e-4)
            utils.safe_set_full_optimizer_state(param, torch.full_like(state, 0.25), name)
            assert utils.safe_get_full_optimizer_state(param, name).eq(0.25).all()
            assert utils.safe_get_local_optimizer_state(param, name).eq(0.25).all()
        with raises(KeyError, "'blocks.1.up.weight' has no 'momentum'; this optimizer keeps exp_avg, exp_avg_sq"):
            utils.safe_get_full_optimizer_state(param, "momentum")
        assert utils.safe_get_full_grad(param) is None
        with raises(RuntimeError, "the parameter has no gradient"):
            utils.safe_set_full_grad(param, torch.zeros(param.shape))
        engine.backward(loss_of(engine, own_parts(batches()[2], 1)[0]))
        gradient = utils.safe_get_full_grad(param)
        assert close(gradient, expected.grad, 1e-4)
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, utils.safe_get_local_grad(param))
        assert torch.equal(torch.cat(parts).view(param.shape), gradient)
        utils.safe_set_full_grad(param, torch.full_like(gradient, 2.0))
        assert utils.safe_get_full_grad(param).eq(2.0).all()
        value = torch.arange(param.numel()).view(param.shape) / 7
        utils.safe_set_full_fp32_param(param, value)
        assert torch.equal(utils.safe_get_full_fp32_param(param), value)
        local = utils.safe_get_local_fp32_param(param)
        utils.safe_set_local_fp32_param(param, local + 1)
        assert torch.equal(utils.safe_get_full_fp32_param(param), value + 1)
    with raises(ValueError, "the value has shape [2], expected"):
        utils.safe_set_full_fp32_param(param, torch.zeros(2))
    foreign = nn.Parameter(torch.zeros(2))
    assert utils.safe_get_full_fp32_param(foreign) is None and utils.safe_get_full_grad(foreign) is None
    with raises(ValueError, "belongs to no engine"):
        utils.safe_set_full_fp32_param(foreign, torch.zeros(2))


@on_ranks(2, backend=["zeropg", "gloo"])
def test_gathered_parameters_are_whole_and_one_rank_writes() -> None:
    from zeropg.deepspeed import utils, zero

    with zero.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with zero.GatheredParameters(model[0].weight, modifier_rank=1):  # before initialize
        if dist.get_rank() == 1:
            model[0].weight.data.fill_(1.0)
    assert model[0].weight.eq(1).all()
    from zeropg import deepspeed

    made = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=configuration(3))
    assert engine.module is model
    first, second = model[0].weight, model[1].weight
    with zero.GatheredParameters([first, second]):
        assert first.eq(1).all() and second.shape == (4, 4)
    with zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        first.fill_(2.0 + dist.get_rank())
        with zero.GatheredParameters(second, modifier_rank=0):
            second.fill_(5.0 + dist.get_rank())
    assert utils.safe_get_full_fp32_param(first).eq(3).all() and utils.safe_get_full_fp32_param(second).eq(5).all()
    with zero.GatheredParameters(first, modifier_rank=0, enabled=False):
        pass
    refused = raises(RuntimeError, "GatheredParameters: a parameter is written", "Pass modifier_rank=")
    with refused, zero.GatheredParameters(first), torch.no_grad():
        first.fill_(9.0)
    assert utils.safe_get_full_fp32_param(first).eq(3).all()
    with raises(NotImplementedError, "remote_device='nvme'"):
        zero.Init(remote_device="nvme")
    model = nn.Linear(4, 4)
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=configuration(1))
    if dist.get_rank() == 0:  # nothing is gathered there
        with zero.GatheredParameters(model.weight):
            assert model.weight.shape == (4, 4)
    engine(torch.ones(2, 4)).sum().backward()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"a": Expert(), "b": Expert()})
        self.head = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, choice: str) -> torch.Tensor:
        return self.head[0](self.experts[choice](x))


@on_ranks(2)
def test_leaf_modules_are_whole_at_once() -> None:
    from zeropg import deepspeed
    from zeropg.deepspeed import utils

    def units(model: nn.Module, **zero: Any) -> list[str]:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = configuration(3) | {"zero_optimization": {"stage": 3, **zero}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=settings)
        # Ranks go through different experts.
        engine.backward(engine(torch.ones(2, 4), "ab"[dist.get_rank()]).sum())
        engine.step()
        return [plan.name for plan in engine.module._zeropg_state.plans]

    layers = [f"experts.{name}.layers.{index}" for name in "ab" for index in range(2)]
    assert units(Mixture()) == [*layers, "head.0", ""]
    model = Mixture()
    assert utils.set_z3_leaf_modules(model, [Expert]) == list(model.experts.values())
    assert utils.z3_leaf_module(model.experts["a"]) and len(utils.get_z3_leaf_modules(model)) == 2
    assert units(model) == ["experts.a", "experts.b", "head.0", ""]
    assert units(Mixture(), leaf_module={"name_suffixes": ["experts.b"]}) == [*layers[:2], "experts.b", "head.0", ""]
    model = Mixture()
    utils.set_z3_leaf_modules(model, ["Expert"])
    utils.unset_z3_leaf_modules(model, [Expert])
    assert units(model) == [*layers, "head.0", ""]
    with raises(ValueError, "no module of Conv2d"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    # DeepSpeed's own list: what a unit would cut, and not the layers inside of one.
    model = Mixture()
    mark_cut(model, ["Expert", "Linear"])
    assert utils.get_z3_leaf_modules(model) == list(model.experts.values())


class TwoTowers(nn.Module):
    """Is trained through methods beside its forward, as CLIP is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        self.text = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))])

    def similarity(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return self.image(images) @ self.text[0](texts).T


def made_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@on_ranks(2, backend=["zeropg", "gloo"])
def test_leaf_modules_are_called_by_themselves() -> None:
    from zeropg import deepspeed
    from zeropg.deepspeed import utils

    inputs = torch.ones(2, 8), torch.ones(2, 6)
    plain = TwoTowers()
    plain.similarity(*inputs).sum().backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    model = TwoTowers()
    for leaf in (model.image, model.text[0], model.text[0][1]):  # the last one is a part of one, and of no account
        utils.set_z3_leaf_module(leaf, True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made_for(model), config=configuration(3))
    assert [plan.name for plan in model._zeropg_state.plans] == ["image", "text.0", ""]
    engine.backward(engine.similarity(*inputs).sum())
    engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx(float(expected))

    model = TwoTowers()
    utils.set_z3_leaf_module(model.text[0][1], True)  # inside of a block
    engine, *_ = deepspeed.initialize(model=model, optimizer=made_for(model), config=configuration(3))
    assert [plan.name for plan in model._zeropg_state.plans] == ["text.0", "text.0.1", ""]


@on_ranks(2)
def test_scripts_start_as_with_deepspeed() -> None:
    import zeropg
    import zeropg.deepspeed as deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    with shared_folder() as folder:
        file = Path(folder) / "ds.json"
        if dist.get_rank() == 0:
            optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
            file.write_text(json.dumps(configuration(1, optimizer=optimizer)))
        dist.barrier()
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
        deepspeed.init_distributed()
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        deepspeed.logger.addHandler(handler)
        for _ in range(2):
            engine, *_ = zeropg.initialize(args=args, model=make_model())
        deepspeed.logger.removeHandler(handler)
    assert len(said) == (dist.get_rank() == 0) and all("zeropg run --local_rank" in line for line in said), said
    assert args.local_rank == dist.get_rank() == deepspeed.comm.get_rank() == engine.global_rank
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.config["zero_optimization"] == {"stage": 1}
    assert torch.device(deepspeed.get_accelerator().current_device_name()) == engine.device
    for make in (deepspeed.ops.adam.FusedAdam, deepspeed.ops.adam.DeepSpeedCPUAdam):
        assert type(make(make_model().parameters())) is torch.optim.AdamW
    for is_decoupled, kind in ((True, zeropg.optim.AdamW), (False, zeropg.optim.Adam)):
        groups = [{"params": list(make_model().parameters()), "lr": 0.3}]
        made = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=is_decoupled, fp32_optimizer_states=False)
        (group,) = made.param_groups
        assert type(made) is kind and (group["state_bits"], group["lr"], group["weight_decay"]) == (16, 0.3, 0.0)
        assert group["decoupled_weight_decay"] is is_decoupled
    with raises(NotImplementedError, "moments in 16 bits are always free of their bias"):
        deepspeed.ops.adam.DeepSpeedCPUAdam(
            make_model().parameters(), bias_correction=False, fp32_optimizer_states=False
        )
    with raises(ValueError, "a param group says bias_correction=True"):
        groups = [{"params": list(make_model().parameters()), "bias_correction": True}]
        deepspeed.ops.adam.FusedAdam(groups, bias_correction=False)


@on_ranks(2)
def test_sharded_parameters_are_known_by_deepspeeds_attributes() -> None:
    from zeropg import deepspeed
    from zeropg.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    def absent(module: nn.Module) -> list[nn.Parameter]:
        """As DeepSpeed-Chat finds what it has to gather."""
        found = [one for one in module.parameters() if hasattr(one, "ds_id")]
        return [one for one in found if one.ds_status == ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]

    class Watched(nn.Linear):
        seen: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Watched.seen = self.weight.ds_status.name
            return super().forward(x)

    assert not absent(make_engine(2).module)
    model = nn.Sequential(Watched(4, 4), Watched(4, 4))
    engine, *_ = deepspeed.initialize(model=model, config=configuration(3, optimizer={"type": "AdamW"}))
    weight = model[0].weight
    assert len({one.ds_id for one in model.parameters()}) == 4
    assert (weight.ds_shape, weight.ds_numel) == ((4, 4), 16) and not hasattr(weight, "ds_tensor")
    for writer in (None, 0):
        assert len(absent(model)) == 4 and ZeroParamStatus.NOT_AVAILABLE == weight.ds_status  # noqa: SIM300
        with deepspeed.zero.GatheredParameters(absent(model), modifier_rank=writer):
            assert not absent(model) and weight.ds_status == ZeroParamStatus.AVAILABLE
            assert weight.ds_status in (ZeroParamStatus.AVAILABLE,) and "AVAILABLE" in repr(weight.ds_status)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert Watched.seen == "AVAILABLE" and weight.ds_status != ZeroParamStatus.AVAILABLE


@on_ranks(2)
def test_adam_may_keep_the_bias_of_its_beginning() -> None:
    from zeropg import deepspeed

    for is_decoupled in (True, False):
        params = {"lr": 0.01, "weight_decay": 0.1, "bias_correction": False, "adam_w_mode": is_decoupled}
        plain = make_model()
        moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in plain.parameters()}
        engines = []
        for stage in (0, 1, 3):
            block = {"optimizer": {"type": "Adam", "params": params}, "gradient_clipping": 0.0}
            engine, *_ = deepspeed.initialize(model=make_model(), config=configuration(stage, **block))
            engines.append(train(engine, batches()[:3]))
        losses = []
        for batch in batches()[:3]:
            plain.zero_grad()
            loss = loss_of(plain, batch)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for p, (first, second) in moments.items():
                    assert p.grad is not None
                    gradient = p.grad if is_decoupled else p.grad + 0.1 * p
                    first.mul_(0.9).add_(gradient, alpha=0.1)
                    second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                    decay = 0.1 * p if is_decoupled else 0
                    p -= 0.01 * (first / (second.sqrt() + 1e-8) + decay)
        for found in engines:
            assert found == engines[0] and found == pytest.approx(losses, rel=1e-4), (found, losses)


def test_estimates_are_those_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    from zeropg.deepspeed import zero

    # 2**30 parameters, a quarter of them in the largest layer: 18 bytes per parameter on the host, by half more.
    zero.estimate_zero3_model_states_mem_needs_all_cold(2**30, 2**28, num_gpus_per_node=8)
    rows = [line.split("|")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    shown = [[cell.strip() for cell in row] for row in rows]
    assert shown[0] == ["27.00GB", "1.00GB"] and shown[1] == ["48.00GB", "1.00GB"]
    assert shown[2] == ["24.00GB", "1.25GB"] and shown[3] == ["48.00GB", "1.25GB"]
    assert shown[4] == ["12.00GB", "3.25GB"] and shown[5] == ["48.00GB", "3.25GB"]
    zero.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000), num_gpus_per_node=4)
    assert "offload_optimizer=none" in capsys.readouterr().out
