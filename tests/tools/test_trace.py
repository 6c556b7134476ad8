"""`python -m zeropg trace`: what a run records, and what becomes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import raises
from tests.spawn import run_ranks
from zeropg import __main__ as program
from zeropg.tools.trace.read import ROOT, WAITS, RankTrace, read_traces

STEPS = 4  # of which 2 and 3 are recorded
CASES = (("gloo", 3), ("zeropg", 3), ("zeropg", 1))


def train(stage: int, steps: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = zeropg.fully_shard(nn.Sequential(*layers, nn.Linear(8, 1)), stage=stage, units=layers)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(4, 8))


def record(folder: str, backend: str) -> None:
    os.environ["ZEROPG_TRACE_STEPS"] = "0-2"
    os.environ["ZEROPG_TRACE"] = f"{folder}/nothing"
    with raises(ValueError, "ZEROPG_TRACE_STEPS is '0-2'"):
        zeropg.fully_shard(nn.Linear(2, 2))
    os.environ["ZEROPG_TRACE_STEPS"] = "2-3"
    for of, stage in CASES:
        if of == backend:
            os.environ["ZEROPG_TRACE"] = f"{folder}/{backend}{stage}"
            train(stage, STEPS)
            dist.barrier()
    os.environ["ZEROPG_TRACE"] = f"{folder}/short-{backend}"
    train(3, 2)  # the model ends before the last step that is asked for
    del os.environ["ZEROPG_TRACE"]
    train(3, STEPS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for backend in ("gloo", "zeropg"):
        run_ranks(2, record, str(folder), backend, backend=backend)
    return folder


def traces_of(folder: Path) -> list[RankTrace]:
    (model,) = {int(path.stem.rpartition("model")[2]) for path in folder.glob("rank*.json")}
    return read_traces(folder, model)


@pytest.mark.parametrize(("backend", "stage"), CASES)
def test_each_rank_records_the_steps_that_were_asked_for(recorded: Path, backend: str, stage: int) -> None:
    traces = traces_of(recorded / f"{backend}{stage}")
    assert [trace.rank for trace in traces] == [0, 1] and not (recorded / "nothing").exists()
    for trace in traces:
        assert len(trace.steps) == 2 and trace.first_step == 2 and trace.stage == stage
        of = {kind: [e for e in trace.events if e.kind == kind] for kind in ("forward", "backward", "gather", "reduce")}
        units = ["0", "1", "2"]
        # Two steps, with one forward for training and one more behind each.
        assert [e.unit for e in of["forward"] if e.unit != ROOT][:3] == units
        assert {e.unit for e in of["forward"]} == {*units, ROOT} and len(of["forward"]) == 4 * 4
        assert {e.unit for e in of["backward"]} == {*units, ROOT} and len(of["backward"]) == 2 * 4
        assert {e.unit for e in of["reduce"]} == {*units, ROOT} and len(of["reduce"]) == 2 * 4
        assert ({e.unit for e in of["gather"]} == {*units, ROOT}) == (backend == "gloo" or stage == 1)
        for whole in (e for e in of["forward"] if e.unit == ROOT):
            inside = [e for e in of["forward"] if e.unit != ROOT and whole.begin <= e.begin and e.end <= whole.end]
            assert len(inside) == 3
        assert all(e.begin <= e.end for e in trace.events) and any(e.kind in WAITS for e in trace.events)
        assert all(e.bytes > 0 for kind in ("gather", "reduce") for e in of[kind])
        assert max(sample.bytes["gradients"] for sample in trace.samples) > 0


@pytest.mark.parametrize("backend", ["gloo", "zeropg"])
def test_a_model_that_ends_early_leaves_what_there_was(recorded: Path, backend: str) -> None:
    assert [len(trace.steps) for trace in traces_of(recorded / f"short-{backend}")] == [1, 1]


def show(folder: Path) -> int:
    return program.main(["trace", str(folder)])


def test_the_command_writes_a_table_a_page_and_a_file_for_chrome(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded / "gloo3"
    (model,) = {path.stem.rpartition("model")[2] for path in folder.glob("rank*.json")}
    assert show(folder) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert "stage 3, gathered, 2 ranks, steps 2 to 3" in text and "waiting for other ranks" in text
    for unit in ("0", "1", "2"):
        (row,) = (line for line in lines if line and line[0] == unit)
        assert len(row) == 7 and all(float(cell) > 0 for cell in row[1:4]), text
    suffix = "" if model == "0" else f".model{model}"
    events = json.loads((folder / f"trace{suffix}.json").read_text())["traceEvents"]
    spans: list[dict[str, Any]] = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1} and all(event["dur"] >= 0 for event in spans)
    begun = sorted(event["id"] for event in events if event["ph"] == "b")
    assert begun and begun == sorted(event["id"] for event in events if event["ph"] == "e")
    page = (folder / f"trace{suffix}.html").read_text()
    assert "forward" in page and "memory of rank" in page and 'src="http' not in page


def test_what_cannot_be_shown_is_said(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(tmp_path) == 1
    assert "has no traces" in capsys.readouterr().err
    (tmp_path / "rank0.model0.json").write_text("{")
    assert show(tmp_path) == 1
    assert "rank0.model0.json is no trace" in capsys.readouterr().err
    (tmp_path / "rank0.model0.json").write_text('{"format": "zeropg trace 9"}')
    assert show(tmp_path) == 1
    assert "use the zeropg that recorded it" in capsys.readouterr().err
    one = next((recorded / "gloo3").glob("rank1.model*.json"))
    (tmp_path / "rank0.model0.json").unlink()
    (tmp_path / one.name).write_text(one.read_text())
    assert show(tmp_path) == 0
    assert "no events of rank 0" in capsys.readouterr().err
    assert program.main(["trace", str(tmp_path), "--model", "77"]) == 1
    assert "no model 77" in capsys.readouterr().err
