"""`bench loss`: its arithmetic, its arms, and a small run on simulated hosts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from zeropg.tools.bench.loss.arms import ARMS, BASELINE, PLAIN
from zeropg.tools.bench.loss.command import main
from zeropg.tools.bench.loss.curves import Pace, paired_difference, steps_to, student
from zeropg.tools.bench.loss.journal import Journal, Place
from zeropg.tools.bench.loss.outcome import Job, Outcome
from zeropg.tools.bench.loss.rows import TOLERANCE, Study, rows_of
from zeropg.tools.bench.loss.tasks import TASKS


@pytest.mark.parametrize("degrees", [1, 4, 12, 30])
def test_95_percent_of_students_distribution_lie_within_the_factor(degrees: int) -> None:
    limit, slices = student(degrees), 20_000
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    at = [limit * (i + 0.5) / slices for i in range(slices)]
    inside = 2 * limit / slices * sum(scale * (1 + t * t / degrees) ** (-(degrees + 1) / 2) for t in at)
    assert inside == pytest.approx(0.95, abs=1e-4)


def test_the_interval_of_a_paired_difference_holds_the_truth_19_times_in_20() -> None:
    generator, held = random.Random(0), 0
    for _ in range(2000):
        baseline = [generator.gauss(2, 5) for _ in range(5)]
        found = paired_difference([each + generator.gauss(0.3, 0.1) for each in baseline], baseline)
        held += found.low <= 0.3 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_one_pair_has_a_difference_and_no_interval() -> None:
    found = paired_difference([2.5], [2.0])
    assert found.mean == 0.5
    assert math.isnan(found.low) and math.isnan(found.high)


def test_a_curve_reaches_a_loss_between_its_points() -> None:
    curve = [(10, 3.0), (20, 2.0), (30, 2.2), (40, 1.0)]
    assert steps_to(curve, 2.5) == 15
    assert steps_to(curve, 2.0) == 20
    assert steps_to(curve, 1.6) == pytest.approx(35)
    assert steps_to(curve, 3.5) == 10
    assert steps_to(curve, 0.9) == math.inf
    assert steps_to([], 1.0) == math.inf


def test_a_curve_that_is_not_a_number_reaches_nothing() -> None:
    assert steps_to([(10, 3.0), (20, math.nan), (30, math.nan)], 1.0) == math.inf


def test_steps_of_a_warm_up_take_their_own_time() -> None:
    pace = Pace(each=1.0, warm_up=10.0, warm_up_steps=3)
    assert [pace.at(step) for step in (0, 2, 3, 5)] == [0, 20, 30, 32]
    assert Pace(each=0.5).at(4) == 2


def test_a_journal_gives_back_what_ran_at_the_same_place_and_nothing_that_was_cut(tmp_path: Path) -> None:
    journal, place = Journal(tmp_path / "kept.jsonl"), Place("100mbit", 2, 2, "abc")
    jobs = [Job("text", BASELINE, 1.0, seed, 20, 10) for seed in range(3)]
    assert journal.outcomes(place, jobs) == {}
    outcome = Outcome(curve=[(10, 3.0), (20, math.nan)], step_seconds=[0.5])
    for job in jobs[:2]:
        journal.append(place, job, outcome)
    whole = journal.path.read_text()
    journal.path.write_text(whole + whole[: len(whole) // 4])  # the third, cut in the middle
    kept = journal.outcomes(place, jobs)
    assert list(kept) == jobs[:2]
    assert kept[jobs[0]].curve[0] == (10, 3.0)
    assert kept[jobs[0]].step_seconds == [0.5]
    for elsewhere in (Place(None, 2, 2, "abc"), Place("100mbit", 4, 2, "abc"), Place("100mbit", 2, 2, "abd")):
        assert journal.outcomes(elsewhere, jobs) == {}


def test_every_arm_trains_tasks_that_exist_and_has_one_that_does_not_compress_beside_it() -> None:
    for name, arm in ARMS.items():
        assert set(arm.tasks) <= set(TASKS), name
        assert {PLAIN[arm.backend], arm.warms_up_as} <= set(ARMS), name
        assert arm.warm_up_steps(0) in (0, 2), name
    assert {ARMS[name].backend for name in PLAIN.values()} == {"gloo", "zeropg"}
    assert next(iter(ARMS)) == BASELINE


def test_rows_join_losses_of_all_seeds_with_steps_on_the_link() -> None:
    def run(*losses: float) -> Outcome:
        return Outcome(curve=list(zip((10, 20), losses, strict=True)), accuracy_percent=50, step_seconds=[9.0])

    int4 = "ddp zeropg int4"
    study = Study(
        task="text",
        link="100mbit",
        steps=20,
        lr_factors={BASELINE: 1, int4: 2},
        runs={BASELINE: [run(3, 2), run(3, 2.2)], int4: [run(3, 2.01), run(2.1, 2.25)]},
        timed={
            BASELINE: Outcome(step_seconds=[1.0, 1.0, 7.0], bytes_per_step=1e6),
            int4: Outcome(step_seconds=[0.25], bytes_per_step=1e5, encode_seconds=0.01),
        },
    )
    rows = {row.peer: row for row in rows_of(study, may_claim=True) if "step" not in row.parameters}
    assert rows[BASELINE].median("total_s") == 20
    found = rows[int4]
    assert found.median("loss_difference") == pytest.approx(0.03)
    assert found.median("loss_difference_low") < 0.03 < found.median("loss_difference_high")
    assert (found.median("total_s"), found.median("total_mb")) == (5, 2)
    assert found.median("encode_ms") == 10 and "decode_ms" not in found.figures
    # The medians: the baseline ends at 2.1, int4 goes from 2.55 to 2.13.
    assert "to_loss_s" not in found.figures
    runs = {BASELINE: study.runs[BASELINE], int4: [run(3, 2.01), run(2.1, 2.2)]}
    found = next(row for row in rows_of(replace(study, runs=runs), may_claim=True) if row.peer == int4)
    step = 10 + 10 * (2.55 - 2.1 - TOLERANCE) / (2.55 - 2.105)
    assert found.median("to_loss_s") == pytest.approx(0.25 * step)
    assert "faster_than_ddp" in found.figures
    silent = rows_of(replace(study, runs=runs), may_claim=False)
    assert "faster_than_ddp" not in next(row for row in silent if row.peer == int4).figures
    assert (found.median("accuracy_difference"), found.median("accuracy_difference_low")) == (0, 0)


def test_without_seeds_rows_have_times_alone() -> None:
    timed = {arm: Outcome(step_seconds=[1.0]) for arm in (BASELINE, "ddp zeropg int4")}
    study = Study("text", "1gbit", 10, dict.fromkeys(timed, 1.0), {arm: [] for arm in timed}, timed)
    rows = rows_of(study, may_claim=True)
    assert [row.peer for row in rows] == list(timed)
    assert all(row.median("step_ms") == 1000 and "loss" not in row.figures for row in rows)


def test_an_arm_that_diverges_claims_nothing() -> None:
    runs = {BASELINE: [Outcome(curve=[(1, 2.0)])], "ddp zeropg int4": [Outcome(curve=[(1, math.nan)])]}
    timed = {arm: Outcome(step_seconds=[1.0]) for arm in runs}
    study = Study("text", "1gbit", 1, dict.fromkeys(runs, 1.0), runs, timed)
    found = next(row for row in rows_of(study, may_claim=True) if row.peer == "ddp zeropg int4")
    assert found.figures["diverged_seeds"] == 1
    assert not {"loss", "to_loss_s", "faster_than_ddp"} & set(found.figures)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "poetry"], "no poetry"),
        (["--arm", "ddp mpi"], "invalid choice"),
        (["--seeds", "-1"], "--seeds must be at least 0"),
        (["--seeds", "0", "--end-to-end"], "it needs --seeds of at least 1"),
        (["--ranks-per-host", "0"], "--ranks-per-host must be at least 1"),
    ],
)
def test_wrong_options_are_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_without_simulated_hosts_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zeropg.tools.bench.loss.command.missing", lambda: "no tc (Debian: iproute2)")
    assert main(["--quick"]) == 2
    assert "no tc" in capsys.readouterr().err
