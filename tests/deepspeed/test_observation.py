"""`wall_clock_breakdown`, `steps_per_print`, `comms_logger` and `flops_profiler`: what they ask for is said."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.deepspeed.training import BATCH, STEPS, batches, make_engine, shared_folder, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_model
from tests.spawn import run_ranks
from zeropg.deepspeed.observation.flops_table import short


def said_in_training(by_hand: bool = False, **keys: Any) -> tuple[list[str], list[float]]:
    """What this rank prints while an engine trains as `keys` ask, and the losses."""
    engine = make_engine(keys.pop("stage", 2), keys.pop("gas", 1), **keys)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        losses = train(engine, batches(), by_hand)
    return said.getvalue().splitlines(), losses


def figures(line: str) -> dict[str, float]:
    return {name.strip(): float(value) for name, value in re.findall(r"([\w/ ]+): ([\d.]+)", line)}


@on_ranks(2)
def test_wall_clock_breakdown_says_where_the_time_of_each_step_goes() -> None:
    for by_hand in (False, True):
        said, _ = said_in_training(by_hand, wall_clock_breakdown=True, gas=2)
        if dist.get_rank() > 0:
            assert said == []
            continue
        assert [line.split()[1] for line in said] == [f"step={step}" for step in range(1, STEPS + 1)]
        for line in said:
            times = figures(line)
            parts = [times[name] for name in ("fwd", "bwd", "step")]
            assert all(part > 0 for part in parts) and sum(parts) + times["rest"] == pytest.approx(
                times["update"], abs=0.1
            )
            assert 0 < times["communication"] < times["update"]
            assert times["samples/s"] == pytest.approx(1e3 * BATCH / times["update"], rel=0.02, abs=0.1)


@on_ranks(2)
def test_steps_per_print_is_the_pace_of_all_lines() -> None:
    said, _ = said_in_training(wall_clock_breakdown=True, steps_per_print=2)
    if dist.get_rank() == 0:
        kinds = [(line.split()[1].strip(","), line.split()[2]) for line in said]
        assert kinds == [(f"step={step}", word) for step in (2, 4) for word in ("time", "skipped=0,")]
        assert "skipped=0, lr=[0.004, 0.004], mom=[(0.9, 0.95), (0.9, 0.95)], samples/s=" in said[1]
    silent, _ = said_in_training(steps_per_print=2, timers={"throughput": {"enabled": False}})
    assert not any("samples/s" in line for line in silent)


@on_ranks(2)
def test_the_log_of_collectives_is_what_the_group_has_counted() -> None:
    import zeropg
    from zeropg.deepspeed import comm

    before = zeropg.stats()
    engine = make_engine(1, comms_logger={"enabled": True, "verbose": True})
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors):
        train(engine, batches())
    after, said = zeropg.stats(), errors.getvalue().splitlines()
    with contextlib.redirect_stdout(printed):
        comm.log_summary(show_straggler=True)
    lines = printed.getvalue().splitlines()
    if dist.get_rank() > 0:
        assert said == [] and lines == []
        return
    rows = {row.split()[0]: row.split() for row in lines[1:]}
    assert lines[0].startswith("Comm. Op") and lines[0].endswith("Straggler(ms)")
    moved = {
        name: after[name]["bytes"] - before.get(name, {"bytes": 0})["bytes"]
        for name in after
        if after[name]["calls"] > before.get(name, {"calls": 0})["calls"]
    }
    # Some come from building the engine, before it logs, and from the test's own sums, after each update.
    assert set(rows) <= set(moved)
    assert all(0 < int(row[2]) <= 2 * moved[name] for name, row in rows.items()), (rows, moved)
    gathered = rows["all_gather_into_tensor"]  # the parameters, padded, after each step
    assert STEPS * 4 * 50_580 <= int(gathered[2]) <= 1.1 * STEPS * 4 * 50_580
    assert float(gathered[6]) == pytest.approx(float(gathered[5]) / 2, abs=0.02)
    assert {line.split()[1] for line in said} == {f"step={step}" for step in range(1, STEPS + 1)}
    assert all("comm op: " in line and "busbw (Gbps): " in line for line in said)


@on_ranks(2)
def test_only_the_operations_that_are_asked_for_are_logged() -> None:
    said, _ = said_in_training(
        stage=1, comms_logger={"enabled": True, "prof_all": False, "prof_ops": ["barrier"], "verbose": True}
    )
    assert said == []


def refuse_a_strange_group() -> None:
    with raises(ValueError, "comms_logger.enabled is true, but the process group is none of zeropg's"):
        make_engine(1, comms_logger={"enabled": True})


def test_a_group_that_counts_nothing_is_refused() -> None:
    run_ranks(2, refuse_a_strange_group, backend="gloo")


@on_ranks(2)
def test_operations_are_those_of_one_plain_process_and_losses_stay() -> None:
    _, plain = said_in_training(stage=3)
    with shared_folder() as folder:
        file = Path(folder) / "new" / "profile.txt"
        profiler = {"enabled": True, "profile_step": 2, "output_file": str(file), "top_modules": 2}
        said, losses = said_in_training(stage=3, flops_profiler=profiler)
        text = file.read_text() if dist.get_rank() == 0 else ""
    assert losses == plain and said == []
    if dist.get_rank() > 0:
        return
    model = make_model()
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model, batches()[0][: BATCH // 2])
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    rows = dict(re.findall(r"^([\w /-]+): +(.+)$", text, re.MULTILINE))
    assert rows["step"] == "3" and rows["micro-batch size of a rank"] == "8"
    assert rows["fwd flops of a micro-batch"] == short(forward.get_total_flops())
    assert rows["bwd flops of a micro-batch"] == short(backward.get_total_flops())
    assert "FLOPS" in rows["fwd latency"] and "FLOPS" in rows["bwd latency"]
    block = sum(forward.get_flop_counts()["SmallGPT.blocks.0"].values())
    assert f"(0) Block: {short(sum(p.numel() for p in model.blocks[0].parameters()))} params" in text
    assert f"{short(block)} flops ({100 * block / forward.get_total_flops():.1f}%)" in text
    assert "depth 2:\n  params       Block: " in text


@on_ranks(2)
def test_a_backward_that_the_program_runs_itself_is_not_counted() -> None:
    said, _ = said_in_training(True, flops_profiler={"enabled": True, "detailed": False, "module_depth": 0})
    if dist.get_rank() == 0:
        text = "\n".join(said)
        assert "bwd flops of a micro-batch:         not seen: run by the program" in text
        assert "depth 0:" in text and "depth 1:" not in text and "detailed" not in text
    else:
        assert said == []


def test_counts_for_people() -> None:
    assert [short(value) for value in (0, 999, 1500, 2.5e6, 3e9, 4e12)] == ["0", "999", "1.5 k", "2.5 M", "3 G", "4 T"]
    assert short(12.34e9, "FLOPS") == "12.3 GFLOPS"
