"""torch.distributed.checkpoint over `zeropg.dcp_state_dict`: out to plain torch and FSDP2, and in from them."""

from __future__ import annotations

import ctypes
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from tests.integration.checkpoint_zoo import Zoo, everything, make, same
from zeropg.checkpoint.dcp.boxes import boxes_of, covering_rows

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing", "ignore:torch.distributed is disabled")
safetensors = pytest.importorskip("safetensors.torch")
# For what plain torch has written: it has no state of parameters that were never stepped.
AS_FAR_AS_THERE = dcp.DefaultLoadPlanner(allow_partial_load=True)


def attempt(function: Any, *args: Any, **kwargs: Any) -> str:
    """The error's text; "" if there is none."""
    try:
        function(*args, **kwargs)
    except (Exception, CheckpointException) as error:  # the second is none of the first
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_flat_range_is_at_most_one_box_less_than_twice_its_dimensions() -> None:
    rng = random.Random(0)
    for dims in range(5):
        for _ in range(60):
            shape = [rng.randint(1, 4) for _ in range(dims)]
            numel = math.prod(shape)
            start, stop = sorted(rng.randint(0, numel) for _ in range(2))
            boxes = list(boxes_of(shape, start, stop))
            assert len(boxes) <= max(1, 2 * dims - 1)
            whole = torch.arange(numel).view(shape)
            found = []
            for box in boxes:
                part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
                assert part.reshape(-1).tolist() == list(range(box.start, box.stop))
                found += part.reshape(-1).tolist()
            assert found == list(range(start, stop))
            if start < stop:
                first, last = covering_rows(shape, start, stop)
                assert 0 <= first <= start < stop <= last <= numel and 8 * (last - first) <= 9 * (stop - start)
                assert (first, last) == (start, stop) or len(list(boxes_of(shape, first, last))) == 1
    assert covering_rows([3, 20, 10], 203, 398) == (200, 400)


# Saved and loaded by sharded models.


def save(directory: Path, stage: int, seed: int, **options: Any) -> None:
    import zeropg

    model, optimizer = make(stage, seed, **options)
    dcp.save(zeropg.dcp_state_dict(model, optimizer) | {"seed": seed}, checkpoint_id=directory)
    expected = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")


def load(directory: Path, stage: int, **options: Any) -> None:
    """Into a model that differs in everything."""
    import zeropg

    model, optimizer = make(stage, 50, **options)
    state = zeropg.dcp_state_dict(model, optimizer) | {"seed": 0}
    dcp.load(state, checkpoint_id=directory)
    expected = torch.load(directory / "expected.pt")
    found = everything(model, optimizer)
    assert same(found, expected), [k for k in expected if k not in found or not torch.equal(found[k], expected[k])]
    model(torch.randint(31, (8,))).float().square().mean().backward()
    optimizer.step()


def save_and_load(directory: Path, stages: list[int], others: list[int]) -> None:
    for stage, other in zip(stages, others, strict=True):
        save(directory / str(stage), stage, seed=stage)
        load(directory / str(stage), other)


def load_each(directory: Path, stages: list[int], others: list[int]) -> None:
    for stage, other in zip(stages, others, strict=True):
        load(directory / str(stage), other)


def test_a_checkpoint_loads_at_any_stage_and_world_size(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save_and_load, tmp_path, [0, 1, 2, 3], [3, 2, 1, 0])
    rank_pool(3).run(load_each, tmp_path, [0, 3], [2, 3])
    rank_pool(3).run(save_and_load, tmp_path / "3", [3], [0])
    rank_pool(2).run(load_each, tmp_path / "3", [3], [3])
    rank_pool(1).run(load_each, tmp_path / "3", [3], [3])
    dcp_to_torch_save(tmp_path / "2", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "2" / "expected.pt")
    plain = Zoo(7)
    plain.load_state_dict(whole["model"])
    assert plain.blocks[1].count == 4 and whole["seed"] == 2
    for name, value in plain.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[name]), name
    for name, entries in whole["optimizer"]["state"].items():
        for key, value in entries.items():
            if f"{name}/{key}" in expected:
                assert torch.equal(value, expected[f"{name}/{key}"]), (name, key)
    assert [group["lr"] for group in whole["optimizer"]["param_groups"]] == [1e-2, 0.3]


# From and to others.


class Net(nn.Module):
    """What FSDP2 shards by rows, tied and frozen parameters too; `spare` is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(19, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.conv = nn.Conv1d(6, 5, 3)
        self.spare = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(6, 19, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x).float().square().mean() + self.norm(self.conv(x.transpose(1, 2))).square().mean()


def train(model: Any, optimizer: Any, steps: int = 2) -> list[float]:
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(19, (4, 5)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    return kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def sharded(seed: int, stage: int, steps: int = 0, make_optimizer: Any = adam, **options: Any) -> tuple[Any, Any]:
    import zeropg

    model = zeropg.fully_shard(Net(seed), stage=stage, **options)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    train(model, optimizer, steps)
    return model, optimizer


def fsdp2(seed: int, steps: int) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model = Net(seed)
    fully_shard(model.layers[1])
    fully_shard(model)
    optimizer = adam(model)
    train(model, optimizer, steps)
    return model, optimizer


def torchs_state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def check_same_state(model: Any, optimizer: Any, other: Any, others_optimizer: Any) -> None:
    """Of a sharded model and one of FSDP2 or none: all tensors, state and options; and both go on alike."""
    import zeropg

    state = torchs_state(other, others_optimizer)
    mine = zeropg.full_state_dict(model, rank0_only=False)
    theirs = {name: whole(value) for name, value in state["model"].items()}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    full = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)
    for name, entries in full["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, whole(state["optimizer"]["state"][name][key])), (name, key)
    assert train(model, optimizer) == pytest.approx(train(other, others_optimizer), rel=1e-5)


def in_bf16_on_a_mesh(directory: Path) -> None:
    """From a mesh that replicates to ranks in a row, and back."""
    from torch.distributed.device_mesh import init_device_mesh

    import zeropg

    mesh = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    options = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
    for stage, here, there in ((1, mesh, {}), (3, mesh, {}), (2, {}, mesh), (0, {}, mesh)):
        model, optimizer = sharded(stage, stage, 2, **options, **here)
        dcp.save(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=directory / str(stage))
        other, others_optimizer = sharded(5, 3 - stage, 1, **options, **there)
        dcp.load(zeropg.dcp_state_dict(other, others_optimizer), checkpoint_id=directory / str(stage))
        expected = everything_of(model, optimizer)
        assert expected["embed.weight"].dtype == torch.float32
        assert same(everything_of(other, others_optimizer), expected)
        with zeropg.full_parameters(other):
            assert torch.equal(other.embed.weight, expected["embed.weight"].bfloat16())
        assert train(other, others_optimizer) == train(model, optimizer)


def test_masters_are_saved_and_replicas_share_the_writing(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(4).run(in_bf16_on_a_mesh, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path / "3").read_metadata()
    embed = metadata.state_dict_metadata["model.embed.weight"]
    assert embed.properties.dtype == torch.float32 and sum(math.prod(c.sizes) for c in embed.chunks) == 19 * 6
    assert len({info.relative_path for info in metadata.storage_data.values()}) == 4


def between_fsdp2_and_zeropg(directory: Path) -> None:
    import zeropg

    model, optimizer = fsdp2(0, 2)
    dcp.save(torchs_state(model, optimizer), checkpoint_id=directory / "fsdp2")
    for stage in range(4):
        mine, my_optimizer = sharded(1, stage)
        dcp.load(zeropg.dcp_state_dict(mine, my_optimizer), checkpoint_id=directory / "fsdp2", planner=AS_FAR_AS_THERE)
        other, others_optimizer = fsdp2(2, 1)
        state = torchs_state(other, others_optimizer)
        dcp.load(state, checkpoint_id=directory / "fsdp2")
        set_torchs_state(other, others_optimizer, state)
        check_same_state(mine, my_optimizer, other, others_optimizer)
        dcp.save(zeropg.dcp_state_dict(mine, my_optimizer), checkpoint_id=directory / f"zeropg{stage}")
        state = torchs_state(other, others_optimizer)
        dcp.load(state, checkpoint_id=directory / f"zeropg{stage}")
        set_torchs_state(other, others_optimizer, state)
        check_same_state(mine, my_optimizer, other, others_optimizer)


def set_torchs_state(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),
    )


def test_fsdp2_reads_what_it_writes_and_the_other_way_round(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(between_fsdp2_and_zeropg, tmp_path)


def load_plain(directory: Path) -> None:
    import zeropg

    for stage in range(4):
        model, optimizer = sharded(1, stage)
        dcp.load(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=directory / "plain", planner=AS_FAR_AS_THERE)
        other = Net(5)
        others_optimizer = adam(other)
        train(other, others_optimizer, 1)
        state = torchs_state(other, others_optimizer)
        dcp.load(state, checkpoint_id=directory / "plain", no_dist=True)
        set_torchs_state(other, others_optimizer, state)
        check_same_state(model, optimizer, other, others_optimizer)


def test_a_checkpoint_of_one_plain_process_loads(rank_pool: Any, tmp_path: Path) -> None:
    model = Net(4)
    optimizer = adam(model)
    train(model, optimizer)
    dcp.save(torchs_state(model, optimizer), checkpoint_id=tmp_path / "plain")
    rank_pool(3).run(load_plain, tmp_path)


# Optimizers.


class Twice(torch.optim.SGD):
    """A class of the user's own, with a number that is no tensor."""

    zeropg_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["calls"] = state.get("calls", 0) + 1
                    state["last"] = p.grad.clone()
                    p.sub_(p.grad, alpha=group["lr"] / state["calls"])


OPTIMIZERS: dict[str, Any] = {
    "amsgrad": lambda model: adam(model, torch.optim.Adam, amsgrad=True),
    "sgd": lambda model: adam(model, torch.optim.SGD),
    "momentum": lambda model: adam(model, torch.optim.SGD, momentum=0.9),
    "dampening": lambda model: adam(model, torch.optim.SGD, momentum=0.9, dampening=0.1),
    "nadam": lambda model: adam(model, torch.optim.NAdam),
    "rprop": lambda model: adam(model, torch.optim.Rprop),
    "asgd": lambda model: adam(model, torch.optim.ASGD),
    "adagrad": lambda model: adam(model, torch.optim.Adagrad, initial_accumulator_value=0.1),
    "rmsprop": lambda model: adam(model, torch.optim.RMSprop, centered=True, momentum=0.5),
    "adadelta": lambda model: adam(model, torch.optim.Adadelta),
    "adamax": lambda model: adam(model, torch.optim.Adamax),
    "radam": lambda model: adam(model, torch.optim.RAdam),
    "own": lambda model: adam(model, Twice),
    "lamb": lambda model: adam(model, _zeropg_optim().LAMB),
    "muon": lambda model: adam(model, _zeropg_optim().Muon),
    "lion": lambda model: adam(model, _zeropg_optim().Lion),
    "tensor_lr": lambda model: torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=torch.tensor(0.02), foreach=False
    ),
}


# Zeros do not stand for the state of a parameter that was never stepped, so that DCP finds none.
NO_ZEROS = ("dampening", "nadam", "rprop", "asgd", "adamax", "own")


def _zeropg_optim() -> Any:
    import zeropg

    return zeropg.optim


def save_and_load_optimizer(directory: Path, name: str) -> None:
    import zeropg

    for stage, other in ((3, 0), (1, 3)):
        model, optimizer = sharded(0, stage, 2, OPTIMIZERS[name])
        dcp.save(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=directory / f"{name}{stage}")
        mine, my_optimizer = sharded(1, other, 0 if stage == 3 else 1, OPTIMIZERS[name])
        for group in my_optimizer.param_groups:
            group.update({"weight_decay": 0.5} if "weight_decay" in group else {})
        lr = my_optimizer.param_groups[0]["lr"]
        state, path = zeropg.dcp_state_dict(mine, my_optimizer), directory / f"{name}{stage}"
        if name in NO_ZEROS:
            assert "Missing key in checkpoint state_dict: optimizer.state.spare" in attempt(
                dcp.load, state, checkpoint_id=path
            )
        dcp.load(state, checkpoint_id=path, planner=AS_FAR_AS_THERE if name in NO_ZEROS else None)
        assert my_optimizer.param_groups[0].get("weight_decay") == optimizer.param_groups[0].get("weight_decay")
        assert not isinstance(lr, torch.Tensor) or my_optimizer.param_groups[0]["lr"] is lr
        found, expected = (
            zeropg.full_optimizer_state_dict(each, rank0_only=False)["state"] for each in (my_optimizer, optimizer)
        )
        if name in ("momentum", "lion", "muon"):  # without a number of steps
            assert not found.pop("spare.weight", {}).get("step") and not found.pop("spare.bias", {}).get("step"), name
        assert found.keys() == expected.keys(), name
        for parameter, entries in expected.items():
            assert found[parameter].keys() == entries.keys(), name
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(found[parameter][key]), torch.as_tensor(value)), (name, key)
        assert train(mine, my_optimizer) == train(model, optimizer), name


def every_optimizer(directory: Path) -> None:
    for name in OPTIMIZERS:
        save_and_load_optimizer(directory, name)


def test_every_kind_of_optimizer_comes_back(rank_pool: Any, tmp_path: Path) -> None:
    """Of parameters that were never stepped, `spare`, too: they have no state before and none afterwards."""
    rank_pool(2).run(every_optimizer, tmp_path)


def several_optimizers(directory: Path) -> None:
    import zeropg

    def make_two(seed: int, stage: int) -> tuple[Any, dict[str, Any]]:
        model = zeropg.fully_shard(Net(seed), stage=stage)
        bodies = [p for n, p in model.named_parameters() if p.requires_grad and "conv" not in n]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = zeropg.shard_optimizer(torch.optim.AdamW(bodies), model)
            conv = zeropg.shard_optimizer(torch.optim.SGD(model.conv.parameters(), momentum=0.9), model)
        for _ in range(2):
            model(torch.arange(10).view(2, 5)).backward()
            body.step()
            conv.step()
            model.zero_grad()
        return model, {"body": body, "conv": conv}

    model, optimizers = make_two(0, 3)
    state = zeropg.dcp_state_dict(model, optimizers)
    assert list(state) == ["model", "optimizer.body", "optimizer.conv"]
    # Deeper inside, as in an object of the program's own.
    dcp.save({"app": {key: value.state_dict() for key, value in state.items()}}, checkpoint_id=directory / "several")
    mine, my_optimizers = make_two(1, 2)
    stateful = zeropg.dcp_state_dict(mine, my_optimizers)
    app = {"app": {key: value.state_dict() for key, value in stateful.items()}}
    dcp.load(app, checkpoint_id=directory / "several")
    for key, value in stateful.items():
        value.load_state_dict(app["app"][key])
    for name in optimizers:
        assert same(everything_of(mine, my_optimizers[name]), everything_of(model, optimizers[name]))


def everything_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    import zeropg

    full = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    state = {f"{name}/{key}": torch.as_tensor(value) for name, each in full.items() for key, value in each.items()}
    return zeropg.full_state_dict(model, rank0_only=False) | state


def test_several_optimizers_and_objects_of_the_programs_own(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(several_optimizers, tmp_path)


class Odd(nn.Module):
    """Parameters and buffers of every shape, dtype and layout."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.number = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.rand(0, 3))
        self.precise = nn.Parameter(torch.rand(3, 5, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.rand(7, 3).half())
        self.across = nn.Parameter(torch.rand(5, 3).t())
        self.image = nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.deep = nn.Parameter(torch.rand(2, 3, 2, 3, 2))
        self.whole = nn.Parameter(torch.randint(9, (3, 3)), requires_grad=False)
        self.chosen = nn.Parameter(torch.rand(3, 3) < 0.5, requires_grad=False)
        self.waves = nn.Parameter(torch.rand(3, 3, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mask", torch.rand(3, 3) < 0.5)
        self.register_buffer("aside", torch.rand(3, 5).t())
        self.register_buffer("nothing", torch.rand(0))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self) -> torch.Tensor:
        return sum(p.float().sum() for p in self.parameters() if p.requires_grad)  # type: ignore[return-value]


def every_tensor(directory: Path) -> None:
    """Also with masters and state in files."""
    import zeropg

    def make_odd(seed: int, stage: int, **options: Any) -> tuple[Any, Any]:
        model = zeropg.fully_shard(Odd(seed), stage=stage, **options)
        optimizer = zeropg.shard_optimizer(adam(model), model)
        model().backward()
        optimizer.step()
        return model, optimizer

    (directory / f"offload{dist.get_rank()}").mkdir()
    offload = {"offload_optimizer": str(directory / f"offload{dist.get_rank()}"), "param_dtype": torch.bfloat16}
    for stage, here, there in ((3, {}, {}), (2, {}, offload), (1, offload, {}), (0, {}, {})):
        model, optimizer = make_odd(0, stage, **here)
        dcp.save(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=directory / str(stage))
        other, others_optimizer = make_odd(1, 3 - stage, **there)
        dcp.load(zeropg.dcp_state_dict(other, others_optimizer), checkpoint_id=directory / str(stage))
        expected, found = everything_of(model, optimizer), everything_of(other, others_optimizer)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[k], v.to(found[k].dtype)) for k, v in expected.items())


def test_tensors_of_every_kind_come_back(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(every_tensor, tmp_path)


# In the background, in parts, and with what does not fit.


def in_the_background(directory: Path) -> None:
    """The steps after the call do not show in what is written."""
    import zeropg

    model, optimizer = sharded(0, 3, 1)
    expected = everything_of(model, optimizer)
    future = dcp.async_save(
        zeropg.dcp_state_dict(model, optimizer), checkpoint_id=directory / "async", process_group=dist.new_group()
    )
    train(model, optimizer, 3)
    future.result()
    writer = dcp.FileSystemWriter(directory / "threads", thread_count=3)
    dcp.save(zeropg.dcp_state_dict(model, optimizer), storage_writer=writer)
    after = everything_of(model, optimizer)
    for name, wanted in (("async", expected), ("threads", after)):
        mine, my_optimizer = sharded(1, 1)
        dcp.load(zeropg.dcp_state_dict(mine, my_optimizer), checkpoint_id=directory / name)
        assert same(everything_of(mine, my_optimizer), wanted)
    error = attempt(
        dcp.async_save,
        zeropg.dcp_state_dict(model),
        storage_writer=dcp.FileSystemWriter(directory / "blocking"),
        process_group=dist.new_group(),
    )
    assert "default stager" in error, error
    error = attempt(dcp.async_save, zeropg.dcp_state_dict(model), checkpoint_id=directory / "same")
    assert "over the group that the model trains with" in error, error


def test_async_save_writes_what_was_there_when_it_was_called(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(in_the_background, tmp_path)


def in_parts(directory: Path) -> None:
    """allow_partial_load: what a checkpoint lacks stays, one name of a tied parameter is enough."""
    import zeropg

    whole_model = {k: v for k, v in Net(8).state_dict().items() if "conv" not in k and k != "head.weight"}
    dcp.save({"model": whole_model}, checkpoint_id=directory / "part")
    model, optimizer = sharded(1, 3, 2)
    before = everything_of(model, optimizer)
    state = zeropg.dcp_state_dict(model)
    assert "Missing key in checkpoint state_dict: model." in attempt(dcp.load, state, checkpoint_id=directory / "part")
    assert same(everything_of(model, optimizer), before)
    dcp.load(state, checkpoint_id=directory / "part", planner=AS_FAR_AS_THERE)
    after = everything_of(model, optimizer)
    for name, value in before.items():
        expected = whole_model.get("embed.weight" if name == "head.weight" else name, value)
        assert torch.equal(after[name], expected), name
    # Names without "model." in front, as of dcp.save(model.state_dict()).
    dcp.save(Net(9).state_dict(), checkpoint_id=directory / "bare")
    bare = state["model"].state_dict()
    dcp.load(bare, checkpoint_id=directory / "bare")
    state["model"].load_state_dict(bare)
    found = zeropg.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in Net(9).state_dict().items())
    weights = {name: value for name, value in Net(10).state_dict().items() if name != "head.weight"}
    if dist.get_rank() == 0:
        (directory / "hf").mkdir()
        safetensors.save_file(weights, directory / "hf" / "model.safetensors")
    dist.barrier()
    bare = state["model"].state_dict()
    dcp.load(bare, storage_reader=HuggingFaceStorageReader(str(directory / "hf")), planner=AS_FAR_AS_THERE)
    state["model"].load_state_dict(bare)
    found = zeropg.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_checkpoint_may_lack_what_the_planner_allows(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(in_parts, tmp_path)


def what_does_not_fit(directory: Path) -> dict[str, str]:
    import zeropg

    rank = dist.get_rank()
    model, optimizer = sharded(0, 3, 1)
    state = zeropg.dcp_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=directory / "good")
    before = everything_of(model, optimizer)
    plain = Net(3).state_dict()

    def saved(name: str, tensors: dict[str, Any], **options: Any) -> Path:
        dcp.save({"model": tensors}, checkpoint_id=directory / name, **options)
        return directory / name

    def load(path: Path, stateful: Any = None) -> str:
        return attempt(dcp.load, stateful or {"model": state["model"]}, checkpoint_id=path)

    errors = {
        "shape": load(saved("shape", plain | {"conv.bias": torch.zeros(6)})),
        "kind": load(saved("kind", plain | {"conv.bias": torch.zeros(5, dtype=torch.int64)})),
        "tied": load(saved("tied", plain | {"head.weight": torch.zeros(19, 6)})),
        "nothing": load(directory / "missing"),
    }
    if rank == 0:
        data = next((directory / "good").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:2000])
    dist.barrier()
    errors["half"] = load(directory / "good")
    if rank == 0:
        (directory / "good" / ".metadata").unlink()
    dist.barrier()
    errors["no metadata"] = load(directory / "good")
    group_of_less = sharded(1, 3, make_optimizer=lambda m: torch.optim.AdamW(m.embed.parameters()))
    dcp.save(zeropg.dcp_state_dict(*group_of_less), checkpoint_id=directory / "less")
    errors["groups"] = load(directory / "less", {"optimizer": state["optimizer"]})
    ams = sharded(1, 3, 1, make_optimizer=lambda m: adam(m, amsgrad=True))
    dcp.save(zeropg.dcp_state_dict(*ams), checkpoint_id=directory / "amsgrad")
    errors["options"] = load(directory / "amsgrad", {"optimizer": state["optimizer"]})
    assert same(everything_of(model, optimizer), before)

    errors["plain model"] = attempt(zeropg.dcp_state_dict, Net())
    errors["plain optimizer"] = attempt(zeropg.dcp_state_dict, model, adam(Net()))
    one_bit = sharded(0, 1, make_optimizer=lambda m: zeropg.optim.OneBitAdam(m.parameters(), warmup_steps=9))
    errors["momenta"] = attempt(zeropg.dcp_state_dict, *one_bit)
    factored = sharded(0, 1, make_optimizer=lambda m: zeropg.optim.Adafactor(m.parameters()))
    errors["factors"] = attempt(zeropg.dcp_state_dict, *factored)
    errors["deep"] = attempt(dcp.save, {"app": {"model": state["model"]}}, checkpoint_id=directory / "deep")
    errors["values"] = attempt(state["model"].load_state_dict, plain)
    errors["not loaded"] = attempt(state["model"].load_state_dict, state["model"].state_dict())
    errors["arithmetic"] = attempt(torch.add, state["model"].state_dict()["conv.bias"], 1)
    errors["torch.save"] = attempt(torch.save, state["model"].state_dict(), directory / f"{rank}.pt")
    other = zeropg.fully_shard(nn.Linear(3, 3))
    one = zeropg.dcp_state_dict(model if rank == 0 else other)
    errors["other model"] = attempt(dcp.save, one, checkpoint_id=directory / "x")
    if rank == 1:
        weight, model.conv.weight = model.conv.weight, nn.Parameter(torch.rand(5, 6, 3))
    errors["replaced"] = attempt(dcp.save, state, checkpoint_id=directory / "replaced")
    if rank == 1:
        model.conv.weight = weight
    hugging_face = HuggingFaceStorageWriter(str(directory / "hf"), save_distributed=True)
    errors["safetensors"] = attempt(dcp.save, state["model"].state_dict(), storage_writer=hugging_face)
    stale = state["optimizer"].state_dict()
    train(model, optimizer)
    errors["stale"] = attempt(dcp.save, stale, checkpoint_id=directory / "stale")
    with zeropg.full_parameters(model):
        errors["inside"] = attempt(dcp.load, {"model": state["model"]}, checkpoint_id=directory / "less")
    return errors


def test_what_does_not_fit_is_one_error_on_every_rank(rank_pool: Any, tmp_path: Path) -> None:
    for errors in rank_pool(2).run(what_does_not_fit, tmp_path):
        for key, words in {
            "shape": "Size mismatch between saved torch.Size([6]) and current: torch.Size([5]) for model.conv.bias",
            "kind": "'conv.bias' is torch.int64 in the checkpoint, here torch.float32",
            "tied": "'embed.weight' and 'head.weight' are one tied tensor in the model, two",
            "nothing": "CheckpointException",  # in words of torch's, others in each version
            "half": "CheckpointException",
            "no metadata": "CheckpointException",
            "groups": "Missing key in checkpoint state_dict",
            "options": "the checkpoint's optimizer keeps ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step']",
            "plain model": "dcp_state_dict: this Net is not a sharded model; call zeropg.fully_shard(model) first",
            "plain optimizer": "expected what zeropg.shard_optimizer returned",
            "momenta": "use zeropg.save_checkpoint",
            "factors": "sums of rows and columns",
            "deep": "must stand at the top",
            "values": "expected what state_dict() of the same object returned",
            "not loaded": "the dictionary was not given to dcp.load",
            "arithmetic": "'conv.bias' is a handle for torch.distributed.checkpoint, which has no values",
            "torch.save": "cannot be pickled",
            "replaced": "rank 1/2] dcp_state_dict: 'conv.weight' changed after fully_shard",
            "safetensors": "a file of safetensors has room for one box of a tensor",
            "stale": "the optimizer has stepped since this state_dict() was made",
            "inside": "load: called inside full_parameters; call it after",
            "other model": "the model's tensors (digest)",
        }.items():
            assert words in errors[key], (key, errors[key])


def peak_growth(action: Any) -> int:
    """The most bytes that this process held while `action` ran, more than before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))


def memory(directory: Path) -> dict[str, int]:
    import zeropg

    def make_wide(width: int, step: bool) -> tuple[Any, Any]:
        layers = [nn.Linear(width, width) for _ in range(6)]
        model = zeropg.fully_shard(nn.Sequential(*layers), stage=3, units=layers)
        optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        if step:
            model(torch.rand(2, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    peaks = {}
    for width in (64, 1024):
        state = zeropg.dcp_state_dict(*make_wide(width, step=True))
        folder = directory / str(width)
        peaks["save"] = peak_growth(lambda state=state, folder=folder: dcp.save(state, checkpoint_id=folder))
        fresh = zeropg.dcp_state_dict(*make_wide(width, step=False))
        peaks["load"] = peak_growth(lambda state=fresh, folder=folder: dcp.load(state, checkpoint_id=folder))
    return peaks


def test_a_rank_holds_its_shards_and_no_whole_tensors(rank_pool: Any, tmp_path: Path) -> None:
    parameters = 6 * 4 * 1024 * 1024  # bytes, of 72 MiB with the state
    for peaks in rank_pool(4).run(memory, tmp_path):
        assert peaks["save"] < 6 << 20, peaks
        assert peaks["load"] < 3 * parameters / 4 + parameters / 4 + (8 << 20), peaks  # state, masters, chunks
