"""What users get wrong and what fails under them: one clear error on every rank, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, close, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import RankPool


@on_ranks(2)
def test_wrong_arguments() -> None:
    linear = nn.Linear(3, 3)
    for stage in (4, -1, None, "3"):
        with raises(ValueError, "stage is", "expected 0, 1, 2 or 3"):
            zeropg.fully_shard(linear, stage=stage)
    for key in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        for dtype in (torch.int32, "bf16", torch.float8_e4m3fn):
            with raises(TypeError, "expected a floating dtype"):
                zeropg.fully_shard(linear, **{key: dtype})
    with raises(NotImplementedError, "offload_params", "not available"):
        zeropg.fully_shard(linear, offload_params="/a/directory")
    for key in ("offload_params", "offload_optimizer"):
        with raises(ValueError, key, "'nvme'", "a directory on a local disk"):
            zeropg.fully_shard(linear, **{key: "nvme"})
    with raises(TypeError, "compression", "BlockQuant"):
        zeropg.fully_shard(linear, compression="int8")
    with raises(TypeError, "expected a torch.nn.Module, got Tensor"):
        zeropg.fully_shard(torch.ones(3))
    with raises(ValueError, "'weight', 'bias' of a lazy module have no shape yet", "forward on a small batch"):
        zeropg.fully_shard(nn.LazyLinear(3))
    with raises(ValueError, "ModuleList has no forward"):
        zeropg.fully_shard(nn.ModuleList([linear]))
    with raises(TypeError):
        zeropg.fully_shard(linear, stag=3)
    with raises(NotImplementedError, "complex", "weight"):
        zeropg.fully_shard(nn.Linear(3, 3, dtype=torch.complex64))
    eight = nn.Linear(3, 3, bias=False)
    eight.weight = nn.Parameter(eight.weight.detach().to(torch.float8_e4m3fn))
    with raises(NotImplementedError, "weight", "float8_e4m3fn, to which no step rounds", "param_dtype=torch.bfloat16"):
        zeropg.fully_shard(eight)
    with torch.inference_mode(), raises(RuntimeError, "called under torch.inference_mode"):
        zeropg.fully_shard(linear)
    for model in (nn.ReLU(), nn.Sequential(), nn.BatchNorm1d(3, affine=False)):
        with raises(ValueError, "has no parameters to shard", type(model).__name__):
            zeropg.fully_shard(model)
    with raises(ValueError, "has no parameters to shard", "ignored_params"):
        zeropg.fully_shard(linear, ignored_params=linear.parameters())
    assert type(linear) is nn.Linear, "a refused model is as before"


@on_ranks(2)
def test_what_a_call_on_a_submodule_asked_for_holds_for_the_model_or_is_refused() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    asked = [
        ({"param_dtype": torch.float32}, {"param_dtype": torch.bfloat16}, "param_dtype=torch.float32"),
        ({"param_dtype": torch.bfloat16}, {}, "param_dtype=torch.bfloat16"),
        ({"stage": 2}, {}, "stage=2"),
        ({"reshard_after_forward": False}, {}, "reshard_after_forward=False"),
        ({"process_group": alone}, {}, f"mesh=[[{dist.get_rank()}]]"),
        ({"offload_optimizer": "cpu"}, {}, "offload_optimizer=cpu"),
    ]
    for inner, outer, named in asked:
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        zeropg.fully_shard(model[1][0], **inner)
        with raises(ValueError, "the submodule '1.0' had " + named, "in both calls"):
            zeropg.fully_shard(model, **outer)
        model[1](torch.ones(2, 3)).sum().backward()  # as it was
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    zeropg.fully_shard(model[1], ignored_params=[model[1].bias])
    with raises(ValueError, "the submodule '1' ignores the parameter 'bias'", "ignored_params of both"):
        zeropg.fully_shard(model)
    zeropg.fully_shard(model, ignored_params=[model[1].bias])
    # Defaults ask for nothing, and the world is the same by any name.
    for inner, outer in (({}, {"stage": 2}), ({"process_group": dist.group.WORLD}, {}), ({"stage": 1}, {"stage": 1})):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        zeropg.fully_shard(model[1], **inner)
        zeropg.fully_shard(model, **outer)(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_groups_and_meshes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with raises(ValueError, "both mesh and process_group"):
        zeropg.fully_shard(nn.Linear(3, 3), mesh=mesh, process_group=dist.group.WORLD)
    with raises(ValueError, "the mesh has 3 dimensions", "mesh['dp']"):
        zeropg.fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1, 2, 1)))
    groups = [mesh.get_group(), dist.new_group([0, 1], backend="gloo"), dist.new_group([0, 1])]
    batch = make_batches(1)[0]
    for options in ({"mesh": mesh}, *({"process_group": group} for group in groups)):
        model = zeropg.fully_shard(make_model(seed=dist.get_rank()), **options)
        assert close(loss_of(model, batch), loss_of(make_model(), batch), 1e-6)
        loss_of(model, batch).backward()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = zeropg.fully_shard(make_model(seed=dist.get_rank()), process_group=alone)
    assert close(loss_of(model, batch), loss_of(make_model(seed=dist.get_rank()), batch), 1e-6)
    loss_of(model, batch).backward()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_one_of_us_and_ddp_averages_gradients(stage: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for module, where in ((ddp, "the model"), (nn.Sequential(ddp), "the submodule '0'")):
        with raises(ValueError, f"fully_shard: {where} is a DistributedDataParallel", "that was wrapped"):
            zeropg.fully_shard(module, stage=stage)
    fsdp = torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))
    with raises(ValueError, "fully_shard: the model is a FullyShardedDataParallel"):
        zeropg.fully_shard(fsdp, stage=stage)
    model = zeropg.fully_shard(ddp.module, stage=stage)
    if stage < 3:  # there it cannot even read the parameters
        with raises(RuntimeError, "forward: the sharded model is inside a DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(nn.Sequential(model))(torch.ones(2, 3))
    teacher = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))  # whose forward calls a sharded model of others
    teacher.module.register_forward_pre_hook(lambda _, inputs: model(*inputs).detach())
    teacher(torch.ones(2, 3)).sum().backward()


def test_without_a_process_group() -> None:
    with raises(ValueError, "not initialised", 'init_process_group("zeropg")'):
        zeropg.fully_shard(nn.Linear(3, 3))


@on_ranks(2)
def test_a_model_that_is_not_sharded_is_refused_by_every_function() -> None:
    plain = nn.Linear(3, 3)
    functions: dict[str, Callable[[Any], Any]] = {
        "full_parameters": lambda model: zeropg.full_parameters(model).__enter__(),
        "full_gradients": lambda model: zeropg.full_gradients(model).__enter__(),
        "local_shards": lambda model: next(zeropg.local_shards(model)),
        "no_sync": lambda model: zeropg.no_sync(model).__enter__(),
        "clip_grad_norm_": lambda model: zeropg.clip_grad_norm_(model, 1.0),
        "full_state_dict": zeropg.full_state_dict,
        "load_full_state_dict": lambda model: zeropg.load_full_state_dict(model, {}),
    }
    for name, function in functions.items():
        with raises(ValueError, f"{name}: this Linear is not a sharded model", "zeropg.fully_shard(model)"):
            function(plain)
        with raises(TypeError, f"{name}: expected a module, got list"):
            function([plain])
    with raises((TypeError, ValueError), "not sharded"):
        zeropg.shard_optimizer(torch.optim.SGD(plain.parameters(), lr=1.0), plain)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_sharding_twice(stage: int) -> None:
    model = zeropg.fully_shard(make_model(), stage=stage)
    with raises(ValueError, "SmallGPT is sharded already"):
        zeropg.fully_shard(model, stage=stage)
    with raises(ValueError, "'norm_1.weight' belongs to a sharded model already", "shard a submodule before"):
        zeropg.fully_shard(model.blocks[0], stage=stage)
    with raises(ValueError, "'0.1.weight' belongs to a sharded model already"):
        zeropg.fully_shard(nn.Sequential(nn.Sequential(nn.ReLU(), model.blocks[1].up)), stage=stage)
    loss_of(model, make_batches(1)[0]).backward()


@on_ranks(3)
def test_models_that_differ_between_ranks() -> None:
    odd = dist.get_rank() == 1

    def frozen(model: nn.Module) -> nn.Module:
        model[0].requires_grad_(not odd)
        return model

    def buffered(model: nn.Module) -> nn.Module:
        model.register_buffer("extra", torch.ones(3 + odd))
        return model

    def two(width: int = 3, **options: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width, **options), nn.Linear(width, 3))

    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
        "shape": (lambda: two(3 + odd), {}, "'0.weight' [4, 3] float32"),
        "missing": (lambda: two(bias=not odd), {}, "'0.bias'"),
        "dtype": (lambda: two().double() if odd else two(), {}, "float64"),
        "frozen": (lambda: frozen(two()), {}, "not trainable"),
        "more": (lambda: nn.Sequential(*two(), *(two() if odd else [])), {}, "'2.weight'"),
        "buffer": (lambda: buffered(two()), {}, "'extra' [4]"),
        "stage": (two, {"stage": 2 + odd}, "stage=3"),
        "units": (two, {"units": [nn.Linear] if odd else []}, "unit '0'"),
        "reduce_dtype": (two, {"reduce_dtype": torch.bfloat16 if odd else None}, "reduce_dtype=torch.bfloat16"),
        "param_dtype": (two, {"param_dtype": torch.bfloat16 if odd else None}, "param_dtype=torch.bfloat16"),
    }
    for make, options, what in cases.values():
        with raises(ValueError, "rank 1 has", "where rank 0 has", what, f"rank {dist.get_rank()}/3"):
            zeropg.fully_shard(make(), **options)


@on_ranks(3)
def test_a_model_that_one_rank_cannot_shard_is_an_error_on_all_at_once() -> None:
    odd = dist.get_rank() == 1
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (lambda: nn.ReLU() if odd else nn.Linear(3, 3), {}, "the ReLU has no parameters to shard"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64 if odd else torch.float32), {}, "is complex"),
        (lambda: nn.Linear(3, 3), {"stage": 7 if odd else 3}, "stage is 7"),
    ]
    for make, options, what in cases:
        others = () if odd else ("rank 1 raised", f"rank {dist.get_rank()}/3")
        with raises((ValueError, NotImplementedError), what, *others):
            zeropg.fully_shard(make(), **options)


# --- ranks that fail ---

AT_ONCE_SECONDS = 25.0  # well before the deadline
DEADLINE_SECONDS = 60.0
OWN_GROUP = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # over the store of the pool, which no death takes away


def train_and_fail(stage: int, moment: str, how: str, backend: str) -> str:
    """Trains; on rank 1 something happens at `moment`. Returns this rank's error and how long it took."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=DEADLINE_SECONDS))
    model = zeropg.fully_shard(make_model(), stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    victim = dist.get_rank() == 1
    armed = [False]

    def fail(*_: Any) -> None:
        if victim and armed[0]:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("mine")

    if moment == "forward":
        model.blocks[1].up.register_forward_pre_hook(fail)
    elif moment == "backward":
        model.blocks[1].up.weight.register_hook(fail)
    else:
        optimizer.register_step_pre_hook(fail)
    batch = make_batches(1)[0]
    begin = time.monotonic()
    try:
        for step in range(4):
            armed[0] = step == 1
            loss_of(model, batch).backward()
            zeropg.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        seconds = time.monotonic() - begin
        assert seconds < AT_ONCE_SECONDS, f"{seconds} s"
        if victim:
            dist.destroy_process_group()  # as at the end of a program that raised
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


class Filling(nn.Module):
    """Returns nothing: its result is in the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, room: torch.Tensor) -> None:
        room.copy_(self.linear(x))


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.filling = nn.Linear(3, 3), Filling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        room = torch.empty_like(x)
        self.filling(self.first(x), room)
        return room.sum()


@on_ranks(2)
def test_a_unit_that_returns_its_result_in_an_argument_is_told_to_return_it() -> None:
    model = Filled()
    zeropg.fully_shard(model, units=[model.filling])
    loss = model(torch.ones(2, 3))
    with raises(RuntimeError, "'filling.linear.weight' is sharded", "writes its result into an argument: return it"):
        loss.backward()


@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_a_rank_that_fails_is_named_by_all_others(moment: str, how: str) -> None:
    stage = 1 if (moment, how) == ("backward", "raise") else 3
    died = (1,) if how == "kill" else ()
    with RankPool(3, backend=None, env=OWN_GROUP) as pool:
        results = pool.run(train_and_fail, stage, moment, how, "zeropg", timeout=90, expect_death=died)
    assert results[1] == (None if how == "kill" else "ArithmeticError: mine")
    for rank in (0, 2):
        assert "rank 1" in results[rank] and f"[zeropg rank {rank}/3]" in results[rank], results[rank]
        assert results[rank].startswith("DistBackendError"), results[rank]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_dies_under_gloo_leaves_nobody_hanging(stage: int) -> None:
    with RankPool(2, backend=None, env=OWN_GROUP) as pool:
        results = pool.run(train_and_fail, stage, "backward", "kill", "gloo", timeout=90, expect_death=(1,))
    assert results[0].startswith("DistBackendError: [zeropg rank 0/2]"), results[0]


@on_ranks(2, backend="gloo")
def test_paths_that_differ_are_an_error_where_units_are_gathered() -> None:
    """At once: blocks of one size would be taken for one another. So in evaluation, too, and inside no_sync."""
    x = torch.ones(1, 4)
    mine, other = (0, 1) if dist.get_rank() == 0 else (1, 0)
    for context in (nullcontext, torch.no_grad, zeropg.no_sync):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        zeropg.fully_shard(model, units=[nn.Linear], process_group=dist.new_group())
        with context(model) if context is zeropg.no_sync else context():
            model(x)
            with raises(RuntimeError, "unshard of", f"rank {other} gathers unit '{other}'", f"gathers unit '{mine}'"):
                model[other](model[mine](x))
            with raises(RuntimeError, "an earlier gather failed"):
                model(x)


@on_ranks(2)
def test_a_second_model_works_after_every_refusal() -> None:
    for stage in STAGES:
        model = make_model()
        with raises(ValueError, "units contains"):
            zeropg.fully_shard(model, stage=stage, units=["nowhere"])
        zeropg.fully_shard(model, stage=stage)
        loss_of(model, make_batches(1)[0]).backward()
