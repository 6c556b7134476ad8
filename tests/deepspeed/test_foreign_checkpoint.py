"""DeepSpeed's checkpoints into an engine: any stage and world size, and those that are not whole or not honest."""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.deepspeed.foreign_files import (
    CLIENT_STATE,
    STEP,
    TAG,
    Training,
    deepspeed_classes,
    make_training,
    write_checkpoint,
    write_universal,
)
from tests.deepspeed.training import configuration
from tests.sharding.ranks import raises
from tests.spawn import RankPool
from zeropg.deepspeed.checkpoints.pickles import read_pickle
from zeropg.deepspeed.checkpoints.stored import Runs

FP16 = {"enabled": True, "initial_scale_power": 4}
KINDS = ("0", "1", "2", "3", "universal")


class Net(nn.Module):
    """Tied weights, frozen ones, buffers, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("offset", torch.linspace(-1, 1, 6))
        self.register_buffer("seen", torch.tensor(3))
        self.frozen = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.norm(self.embedding(x))
        return self.head(self.middle(torch.tanh(self.frozen(embedded + self.offset.to(embedded.dtype)))))


def param_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]]


def training() -> Training:
    model = Net()
    model.offset.mul_(7)
    return make_training(model, param_groups(model))


def write_all(directory: Path, world_size: int = 2) -> None:
    for kind in KINDS:
        if kind == "universal":
            write_universal(directory / kind, training(), world_size=world_size)
        else:
            write_checkpoint(directory / kind, training(), stage=int(kind), world_size=world_size, fp16=kind in "23")


def make(stage: int, has_schedule: bool = True, steps_by: Any = torch.optim.AdamW, **more: Any) -> Any:
    from zeropg import deepspeed

    model = Net()
    groups = [{"params": group} for group in param_groups(model)]
    config = {"train_batch_size": 12, "zero_optimization": {"stage": stage}, **more}
    if has_schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}
    return deepspeed.initialize(model=model, optimizer=steps_by(groups, lr=0.1), config=config)[0]


def load_all(directory: str) -> None:
    """Every kind into a stage of its own: what is loaded is what was written, to the last bit."""
    import zeropg

    torch.set_num_threads(1)
    expected = training()
    for number, kind in enumerate(KINDS):
        folder = Path(directory) / kind
        more: dict[str, Any] = {"checkpoint": {"load_universal": True}} if kind == "universal" else {}
        more |= {"fp16": FP16} if kind in "23" else {"bf16": {"enabled": True}}
        engine = make((number + 1) % 4, kind != "1", **more)
        path, client_state = engine.load_checkpoint(folder)
        assert path is not None and client_state == CLIENT_STATE
        assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (STEP, 112, 1)
        assert kind == "1" or engine.lr_scheduler.last_batch_iteration == 6
        assert engine.cur_scale == (512 if kind in "23" else 1)
        weights = zeropg.full_state_dict(engine.module, rank0_only=False)
        for name, value in (expected.parameters | expected.buffers).items():
            assert torch.equal(weights[name], value), (kind, name)
        with zeropg.full_parameters(engine.module):  # what forwards read, frozen ones too
            for name, parameter in engine.module.named_parameters():
                assert torch.equal(parameter, expected.parameters[name].to(parameter.dtype)), (kind, name)
        whole = zeropg.full_optimizer_state_dict(engine.optimizer, rank0_only=False)
        for name in expected.trained:
            for key, value in expected.state[name].items():
                assert torch.equal(whole["state"][name][key], value), (kind, name, key)
            assert whole["state"][name]["step"] == STEP
        for group, options in zip(engine.optimizer.param_groups, expected.options, strict=True):
            found = {key: group[key] for key in ("betas", "weight_decay", *(["lr"] if kind == "1" else []))}
            assert found == {key: options[key] for key in found}, (kind, found)
            assert "bias_correction" not in group
        loss = engine(torch.arange(11)).float().square().mean()  # and it goes on
        engine.backward(loss)
        engine.step()
        engine.load_checkpoint(folder, load_module_only=True)
        assert engine.global_steps == STEP + 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_kind_that_two_ranks_saved_loads_to_the_last_bit(tmp_path: Path, world_size: int) -> None:
    write_all(tmp_path)
    with RankPool(world_size) as pool:
        pool.run(load_all, str(tmp_path), timeout=120)


def test_fp32_weights_come_by_the_functions_of_deepspeeds_script(tmp_path: Path) -> None:
    from zeropg.deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    expected = training()
    write_checkpoint(tmp_path, expected, stage=2, world_size=2)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    tied = {name: expected.parameters[kept] for name, kept in expected.tied.items()}
    wanted = expected.parameters | tied | expected.buffers
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, TAG, exclude_frozen_parameters=True)
    assert found.keys() - trained.keys() == set(expected.frozen)
    model = load_state_dict_from_zero_checkpoint(Net(), tmp_path)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(written["middle.weight"], wanted["middle.weight"])


def test_a_part_is_read_of_the_runs_that_overlap_it() -> None:
    values = torch.arange(30)
    stored = Runs((30,), ((0, values[:10]), (10, values[10:])), values.dtype)
    for start, stop in ((0, 5), (8, 12), (25, 30), (7, 7)):
        found = [at + i for at, each in stored.pieces(start, stop) for i in range(each.numel())]
        assert found == list(range(start, stop))


def load_of_another_optimizer(directory: str) -> None:
    from zeropg.deepspeed.ops.adam import FusedAdam

    lamb, again = Path(directory) / "lamb", Path(directory) / "again"
    engine = make(2)
    with pytest.warns(UserWarning, match="says optimizer Lamb, yours steps as AdamW; .* has bias_correction=False"):
        _, client_state = engine.load_checkpoint(lamb, load_lr_scheduler_states=False)
    assert client_state == {**CLIENT_STATE, "lr_scheduler": {"last_batch_iteration": 6}}
    engine = make(2, steps_by=partial(FusedAdam, bias_correction=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load_checkpoint(Path(directory) / "uncorrected", load_lr_scheduler_states=False)
    with pytest.warns(UserWarning, match="has bias_correction=True, yours has False"):
        engine.load_checkpoint(again)
    assert not any(group["bias_correction"] for group in engine.optimizer.param_groups)
    engine = make(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load_checkpoint(again)  # two names of equal values are no loss for tied ones


def test_what_fits_but_steps_otherwise_is_warned_of(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "lamb", training(), stage=2, world_size=1)
    change(folder / MODEL, lambda c: c["ds_config"].update(optimizer={"type": "Lamb"}))
    change(folder / OPTIMIZER.format(0), lambda c: groups_in(c)[0].update(bias_correction=False))
    folder = write_checkpoint(tmp_path / "uncorrected", training(), stage=2, world_size=1)
    change(folder / MODEL, lambda c: c["ds_config"].update(optimizer={"type": "AdamW"}))
    change(folder / OPTIMIZER.format(0), lambda c: [g.update(bias_correction=False) for g in groups_in(c)])
    folder = write_checkpoint(tmp_path / "again", training(), stage=1, world_size=1)
    change(folder / MODEL, lambda c: c["ds_config"].update(optimizer={"type": "Adam"}))
    change(folder / MODEL, lambda c: (c["shared_params"].clear(), c["module"].update(copied(c["module"]))))
    with RankPool(1) as pool:
        pool.run(load_of_another_optimizer, str(tmp_path), timeout=60)


def copied(module: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"head.weight": module["embedding.weight"].clone()}


class Huge:
    def __reduce__(self) -> tuple[Any, ...]:
        return np.zeros(0).__reduce__()[0], (np.ndarray, (1 << 50,), b"b")


def test_programs_data_comes_back_and_other_objects_of_numpy_are_refused(tmp_path: Path) -> None:
    arrays = [np.arange(6).reshape(2, 3).astype(code) for code in ("?", "i1", "<u2", ">i4", "u8", "f2", "<f8", "c16")]
    arrays += [np.asfortranarray(arrays[0]), np.array(3.5), np.zeros((0, 2))]
    saved = {"arrays": arrays, "one": np.float64(2.5), "args": argparse.Namespace(lr=0.1, seeds=arrays[3])}
    saved["random"] = np.random.RandomState(3).get_state()
    torch.save(saved, tmp_path / "file.pt")
    read = read_pickle(tmp_path / "file.pt")
    for found, expected in zip(read["arrays"], arrays, strict=True):
        assert type(found) is np.ndarray and np.array_equal(found, expected)
        assert found.dtype == expected.dtype.newbyteorder("="), "numpy swaps bytes when it unpickles"
    assert read["one"] == 2.5 and type(read["one"]) is np.float64
    assert type(read["args"]) is argparse.Namespace and type(read["args"].seeds) is np.ndarray
    np.random.RandomState().set_state(read["random"])
    for refused in (np.array([None, "a"]), np.zeros(2, [("x", "i4")]), np.array("2026", "M8[Y]"), Huge()):
        torch.save({"value": refused}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match=r"file.pt' is refused: it .*; none of it was run"):
            read_pickle(tmp_path / "file.pt")


# Folders that are not whole, not of one job, or not honest.


class Evil:
    """Would make a file, were it unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def poison(path: Path) -> None:
    torch.save({"module": {}, "client": Evil(path.parent / "was_run")}, path)


def copy_from(other: str, name: str) -> Callable[[Path], None]:
    return lambda folder: (shutil.copy(folder.parent.parent / other / TAG / name, folder / name), None)[1]


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrites a file as another run or step would have written it."""
    with deepspeed_classes():
        content = torch.load(path, weights_only=False)
        edit(content)
        torch.save(content, path)


def add_zero_folder(folder: Path) -> None:
    shutil.copytree(next((folder.parent.parent / "universal").glob("*/zero")), folder / "zero")


def groups_in(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


def untied(module: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"head.weight": module["embedding.weight"] + 1}


MODEL, MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
MODEL_3_0 = MODEL_3.replace("rank_1", "rank_0")
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
BAD: dict[str, tuple[str, Callable[[Path], None], type[Exception], tuple[str, ...]]] = {
    "untied": (
        "1",
        lambda f: change(f / MODEL, lambda c: (c["shared_params"].clear(), c["module"].update(untied(c["module"])))),
        ValueError,
        ("one tied tensor in the model, two with other values in the checkpoint: head.weight and embedding.weight",),
    ),
    "another scheduler": (
        "3",
        lambda f: [change(f / n, lambda c: c.update(lr_scheduler={"last_epoch": 3})) for n in (MODEL_3_0, MODEL_3)],
        ValueError,
        ("scheduler keeps ['last_epoch'], yours (WarmupLR) keeps ['last_batch_iteration']",),
    ),
    "no model file": ("2", lambda f: (f / MODEL).unlink(), FileNotFoundError, ("no file ..._model_states.pt",)),
    "no file of rank 0": (
        "2",
        lambda f: (f / OPTIMIZER.format(0)).unlink(),
        FileNotFoundError,
        ("no optimizer file of rank 0, but one of rank 1",),
    ),
    "no file of rank 1": (
        "2",
        lambda f: (f / OPTIMIZER.format(1)).unlink(),
        FileNotFoundError,
        ("was saved by 2 ranks", "of 1:"),
    ),
    "no optimizer files": (
        "3",
        lambda f: [(f / OPTIMIZER.format(rank)).unlink() for rank in (0, 1)] and None,
        FileNotFoundError,
        ("no file ..._optim_states.pt",),
    ),
    "no model file of rank 1": ("3", lambda f: (f / MODEL_3).unlink(), FileNotFoundError, ("model files of 1 ranks",)),
    "cut": ("1", lambda f: cut(f / OPTIMIZER.format(1)), ValueError, (OPTIMIZER.format(1), "cut off or damaged")),
    "cut model": ("1", lambda f: cut(f / MODEL), ValueError, (MODEL, "cut off or damaged")),
    "two stages": ("1", copy_from("3", MODEL_3), ValueError, ("two checkpoints were mixed",)),
    "another stage": ("1", copy_from("2", OPTIMIZER.format(1)), ValueError, ("zero_stage 2, the file",)),
    "another world": ("2", copy_from("wide", OPTIMIZER.format(1)), ValueError, ("partition_count [3, 3]",)),
    "more ranks": ("2", copy_from("wide", OPTIMIZER.format(2)), FileNotFoundError, ("saved by 2 ranks", "of 3")),
    "another step": (
        "1",
        lambda f: change(f / MODEL, lambda c: c["module"]["middle.weight"].mul_(2)),
        ValueError,
        (MODEL, "holds other values of 'middle.weight'"),
    ),
    "another step of a rank": (
        "2",
        lambda f: change(f / OPTIMIZER.format(1), lambda c: groups_in(c)[0].update(lr=9.0)),
        ValueError,
        (OPTIMIZER.format(1), "has param_groups"),
    ),
    "a key of rank 1": (
        "2",
        lambda f: change(
            f / OPTIMIZER.format(1),
            lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(more=torch.ones(4)),
        ),
        ValueError,
        ("only some ranks' files hold the optimizer's 'more'",),
    ),
    "universal, too": ("2", add_zero_folder, ValueError, ("a universal checkpoint (zero/)", "of one that is not")),
    "ours, too": (
        "2",
        lambda f: (f / "zeropg_checkpoint.json").touch(),
        ValueError,
        ("a checkpoint of zeropg (zeropg_checkpoint.json) and one of DeepSpeed",),
    ),
    "code": ("2", lambda f: poison(f / MODEL), ValueError, (MODEL, "posix.system", "none of it was run")),
    "code of a rank": ("3", lambda f: poison(f / OPTIMIZER.format(1)), ValueError, ("posix.system",)),
}


def load_bad(directory: str) -> None:
    import zeropg

    torch.set_num_threads(1)
    engine = make(2)
    before = zeropg.full_state_dict(engine.module, rank0_only=False)
    for name, (_, _, kind, words) in BAD.items():
        with raises(kind, "ranks 0, 1: ", *words):
            engine.load_checkpoint(Path(directory) / name)
        assert not list(Path(directory).rglob("was_run")), "a pickle was run"
    whole = Path(directory) / "2"
    assert engine.load_checkpoint(Path(directory) / "nothing") == (None, None)
    with raises(FileNotFoundError, "there is no such directory"):
        engine.load_checkpoint(whole, tag="global_step8")
    with raises(ValueError, "ranks 0, 1: ", "holds a checkpoint of DeepSpeed", "another tag"):
        engine.save_checkpoint(whole, tag=TAG)
    sgd_model = Net()
    sgd_groups = [{"params": group} for group in param_groups(sgd_model)]
    from zeropg import deepspeed

    sgd = torch.optim.SGD(sgd_groups, lr=0.1, momentum=0.9)
    sgd_engine, *_ = deepspeed.initialize(model=sgd_model, optimizer=sgd, config=configuration(2))
    with raises(ValueError, "keeps ['exp_avg', 'exp_avg_sq'] of", "load_optimizer_states=False"):
        sgd_engine.load_checkpoint(whole)
    after = zeropg.full_state_dict(engine.module, rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items()), "the model is as it was"
    assert engine.global_steps == 0 and not engine.optimizer.state


def test_bad_folders_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    write_all(tmp_path)
    write_checkpoint(tmp_path / "wide", training(), stage=2, world_size=3)
    for name, (kind, damage, _, _) in BAD.items():
        shutil.copytree(tmp_path / kind, tmp_path / name)
        damage(tmp_path / name / TAG)
    with RankPool(2) as pool:
        pool.run(load_bad, str(tmp_path), timeout=120)
