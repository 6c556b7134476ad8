"""Monitors write DeepSpeed's tags, on rank 0, and say what they miss."""

from __future__ import annotations

import csv
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed.training import batches, make_engine, own_parts, shared_folder, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of


def files_of(folder: str) -> dict[str, list[list[str]]]:
    """Rows of each CSV file."""
    return {path.name: list(csv.reader(path.open())) for path in sorted(Path(folder, "job").glob("*"))}


@on_ranks(2, timeout=120)
def test_csv_files_have_a_row_for_each_update() -> None:
    with shared_folder() as folder:
        block = {"enabled": True, "output_path": folder, "job_name": "job"}
        fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
        engine = make_engine(2, gas=2, csv_monitor=block, fp16=fp16, scheduler={"type": "WarmupLR", "params": {}})
        assert engine.monitor.enabled
        losses, rates, scales = [], [], []
        for batch in batches()[:3]:
            mine = []
            for part in own_parts(batch, 2):
                loss = loss_of(engine, part)
                engine.backward(loss)
                engine.step()
                mine.append(loss.item())
            losses.append(sum(mine) / 2)
            rates.append(engine.get_lr()[0])
            scales.append(engine.cur_scale)
        engine.monitor.write_events([("Eval/my score", torch.tensor(0.5), 7), ("plain", 1, 8)])
        dist.barrier()
        found = files_of(folder)
        names = ["Eval_my_score.csv", "Train_Samples_loss_scale.csv", "Train_Samples_lr.csv"]
        assert list(found) == [*names, "Train_Samples_train_loss.csv", "plain.csv"]
        assert found["Eval_my_score.csv"] == [["step", "my score"], ["7", "0.5"]]
        for name, values in (("lr", rates), ("loss_scale", scales), ("train_loss", losses)):
            head, *rows = found[f"Train_Samples_{name}.csv"]
            assert head == ["step", name] and [row[0] for row in rows] == ["16", "32", "48"]
            if dist.get_rank() == 0:  # the loss is that of rank 0
                assert [float(row[1]) for row in rows] == pytest.approx(values)
        assert scales[-1] > scales[0], "the scale moves"
        # A run that goes on appends, and has one head.
        resumed = make_engine(2, csv_monitor=block)
        train(resumed, batches()[:1])
        dist.barrier()
        assert [row[0] for row in files_of(folder)["Train_Samples_lr.csv"]] == ["step", "16", "32", "48", "16"]


@on_ranks(2)
def test_times_are_written_with_the_breakdown() -> None:
    with shared_folder() as folder:
        block = {"enabled": True, "output_path": folder, "job_name": "job"}
        engine = make_engine(1, csv_monitor=block, wall_clock_breakdown=True, steps_per_print=2)
        for batch in batches()[:4]:
            loss_of(engine, own_parts(batch, 1)[0]).backward()
            engine.step()
        dist.barrier()
        found = files_of(folder)
        assert "Train_Samples_train_loss.csv" not in found, "the program has run the backward itself"
        for phase in ("forward", "backward", "step"):
            rows = found[f"Train_Samples_elapsed_time_ms_{phase}.csv"]
            assert [row[0] for row in rows] == ["step", "32", "64"] and all(float(row[1]) > 0 for row in rows[1:])


@on_ranks(2)
def test_without_a_monitor_nothing_is_written() -> None:
    engine = make_engine(0)
    assert not engine.monitor.enabled
    engine.monitor.write_events([("tag", 1.0, 1)])
    train(engine, batches()[:1])


@on_ranks(2)
def test_what_cannot_be_opened_is_an_error_on_every_rank() -> None:
    with shared_folder() as folder:
        Path(folder, "file").touch()
        with raises(OSError, "initialize", "file"):
            make_engine(0, csv_monitor={"enabled": True, "output_path": f"{folder}/file"})
    missing = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
    hidden = {name: sys.modules.get(name) for name in ("wandb", "comet_ml", "torch.utils.tensorboard")}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # imports of them fail
    try:
        for block, package in missing.items():
            with raises(RuntimeError, f"{block}.enabled is true", f"pip install {package}", "csv_monitor"):
                make_engine(0, **{block: {"enabled": True}})
    finally:
        for name, module in hidden.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


@on_ranks(2)
def test_services_get_what_their_packages_take() -> None:
    """Their packages need accounts; stand-ins record the calls."""
    calls: list[Any] = []
    wandb = types.ModuleType("wandb")
    wandb.run = None  # type: ignore[attr-defined]
    wandb.init = lambda **options: calls.append(("init", options))  # type: ignore[attr-defined]
    wandb.log = lambda values, step: calls.append((values, step))  # type: ignore[attr-defined]
    experiment = types.SimpleNamespace(
        set_name=lambda name: calls.append(("name", name)),
        log_metric=lambda **metric: calls.append(metric),
    )
    comet = types.ModuleType("comet_ml")
    comet.start = lambda **options: calls.append(("start", options)) or experiment  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("wandb", "comet_ml")}
    sys.modules.update(wandb=wandb, comet_ml=comet)
    try:
        services = {
            "wandb": {"enabled": True, "team": "us", "group": "g"},
            "comet": {"enabled": True, "samples_log_interval": 20, "experiment_name": "first", "online": False},
        }
        engine = make_engine(1, **services)
        for samples in (16, 32, 48):
            engine.monitor.write_events([("tag", 1.0, samples)])
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    if dist.get_rank() > 0:
        assert calls == []
        return
    nothing = {"api_key": None, "project": None, "workspace": None, "experiment_key": None, "mode": None}
    assert calls[:3] == [
        ("init", {"project": "deepspeed", "group": "g", "entity": "us"}),
        ("start", nothing | {"online": False}),
        ("name", "first"),
    ]
    logged = [call for call in calls[3:] if isinstance(call, tuple)]
    assert logged == [({"tag": 1.0}, samples) for samples in (16, 32, 48)]
    sent = [call for call in calls[3:] if isinstance(call, dict)]
    assert sent == [{"name": "tag", "value": 1.0, "step": samples} for samples in (16, 48)]


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def write_events(folder: str) -> list[float]:
    engine = make_engine(3, tensorboard={"enabled": True, "output_path": folder, "job_name": "job"})
    return train(engine, batches()[:2])


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tests.spawn import run_ranks

    run_ranks(2, write_events, str(tmp_path), timeout=120)
    found = read_events(tmp_path / "job")
    assert list(found) == ["Train/Samples/train_loss", "Train/Samples/lr"]
    assert [step for step, _ in found["Train/Samples/lr"]] == [16, 32]


@on_ranks(2)
def test_a_monitor_that_cannot_write_stops_and_training_goes_on() -> None:
    with shared_folder() as folder:
        engine = make_engine(1, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"})

        class Full:
            def write(self, events: Any) -> None:
                raise OSError(28, "No space left on device")

        if dist.get_rank() == 0:
            engine.monitor._monitors.insert(0, Full())
        train(engine, batches()[:2])
        dist.barrier()
        assert [row[0] for row in files_of(folder)["Train_Samples_lr.csv"]] == ["step", "16", "32"]
        if dist.get_rank() == 0:
            assert len(engine.monitor._monitors) == 1
            engine.monitor._monitors.insert(0, Full())
            with raises(OSError, "No space left"):
                engine.monitor.write_events([("mine", 1, 1)])
