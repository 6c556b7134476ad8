"""`bench nodes`: its bounds, its rows, and what ranks and command tell each other. tests/lab runs it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from zeropg import __main__ as program
from zeropg.tools.bench.nodes import standstills, steps
from zeropg.tools.bench.nodes.bounds import Links, all_reduce_seconds, blocks_seconds, bound_seconds, links_of
from zeropg.tools.bench.nodes.cases import CASES, Case, Point
from zeropg.tools.bench.nodes.command import main
from zeropg.tools.bench.nodes.dialogue import Dialogue, Plan
from zeropg.tools.bench.nodes.rank import PROGRAMS
from zeropg.tools.bench.nodes.rows import Measured, rows_of
from zeropg.tools.bench.results import write_results
from zeropg.tools.train.gpt import GPT


@pytest.mark.parametrize("rates", [(2.0, 2.0), (4.0, 1.0), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 1.0), (8.0, 8.0, 8.0, 0.5)])
def test_the_all_reduce_bound_is_that_of_the_best_shares(rates: tuple[float, ...]) -> None:
    """A node with the share f sends (1 - f) once and f to m - 1 others: bisection for the least time of the slowest."""
    others = len(rates) - 2
    low, high = 0.0, 100.0
    for _ in range(60):
        seconds = (low + high) / 2
        room = [(seconds * rate - 1) / others if others else 0.5 for rate in rates]
        fits = all(seconds * rate >= 1 for rate in rates) and sum(room) >= 1
        low, high = (low, seconds) if fits else (seconds, high)
    assert all_reduce_seconds(1, rates) == pytest.approx(high)


def test_an_all_reduce_on_equal_links_is_that_of_a_ring_of_nodes() -> None:
    for nodes in (2, 3, 8):
        assert all_reduce_seconds(1000, [10.0] * nodes) == pytest.approx(100 * 2 * (nodes - 1) / nodes)


def test_blocks_leave_where_they_are_not_owned_and_come_where_they_are() -> None:
    assert blocks_seconds(1000, [10.0] * 4, [2] * 4) == pytest.approx(75)
    assert blocks_seconds(1000, [10.0, 10.0], [3, 1]) == pytest.approx(75)  # node 1 sends 3 of 4 blocks
    assert blocks_seconds(1000, [1000.0, 10.0], [3, 1]) == pytest.approx(75)
    assert blocks_seconds(1000, [1000.0] * 3 + [10.0], [1] * 4) == pytest.approx(75)


def test_uplinks_bind_racks_as_links_bind_nodes() -> None:
    links = Links((20.0,) * 4, (5.0, 5.0))
    assert bound_seconds("all_reduce", 1000, links, [1] * 4) == pytest.approx(200)
    assert bound_seconds("all_gather", 1000, links, [1, 1, 2, 2]) == pytest.approx(1000 * 2 / 3 / 5)
    wide = Links((20.0,) * 4, (1e6, 1e6))
    assert bound_seconds("reduce_scatter", 1000, wide, [1] * 4) == pytest.approx(37.5)


def test_a_link_has_the_rate_of_its_fastest_stream() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert links_of(ring, [20.0, 19.0, 10.0, 9.0], racks=1) == Links((20.0, 20.0, 19.0, 10.0))
    assert links_of(ring, [20.0, 5.0, 19.0, 6.0], racks=2) == Links((20.0, 20.0, 19.0, 19.0), (6.0, 6.0))


def test_cases_are_whole() -> None:
    for name, case in CASES.items():
        assert set(case.hosts) == set(range(len(case.rates))), name
        assert case.program in PROGRAMS and (case.program == "drop") == (case.drops is not None), name


def test_a_step_is_that_of_a_model_of_the_size_that_it_names() -> None:
    assert sum(p.numel() * p.element_size() for p in GPT(steps._SHAPE).parameters()) == steps.WEIGHT_BYTES


def rows(case: Case, result: dict[str, Any], bounds: tuple[float, ...] = (), **more: Any) -> list[Any]:
    return rows_of(Measured("a case", case, Point("all_reduce", 10**9), bounds, result), **({"may_claim": True} | more))


def test_rows_stand_beside_gloo_and_the_bound() -> None:
    result = {
        "seconds": {"zeropg": [[1.0, 2.0, 2.0], [4.0]], "gloo": [[6.0], [6.0]]},
        "cpu_seconds": {"zeropg": [1.0, 1.0], "gloo": [2.0, 2.0]},
    }
    ours, theirs = rows(CASES["fast_2x1"], result, (1.0,))
    assert (ours.median("time_ms"), ours.median("percent_of_bound")) == (3000, 37.5)
    assert str(ours.figures["faster_than_gloo"]) == "2.25 (1.50-3.00)"
    assert (ours.median("cpu_s_per_gb"), ours.median("cpu_over_gloo")) == (1, 0.5)
    assert (theirs.median("cpu_s_per_gb"), theirs.peer) == (2, "gloo") and "faster_than_gloo" not in theirs.figures
    refused = rows(CASES["fast_2x1"], result, may_claim=False)[0].figures
    assert not {"faster_than_gloo", "cpu_over_gloo", "percent_of_bound"} & set(refused)


def test_rows_say_when_a_changed_link_is_noticed() -> None:
    slow_to_learn = [*[1.0] * 25, *[9.0] * 3, *[5.0] * 22, *[2.0] * 25]
    result = {"seconds": {"zeropg": [slow_to_learn], "gloo": [[*[1.0] * 25, *[8.0] * 25, *[1.0] * 25]]}}
    every = rows(CASES["drop"], result, (1.0, 4.0))
    ours, theirs = (row for row in every if "number" not in row.parameters)
    assert ours.median("dropped_near_after_operations") == 3
    assert (ours.median("dropped_over_bound"), ours.median("restored_over_bound")) == (1.25, 2.0)
    assert "restored_near_after_operations" not in ours.figures
    assert (theirs.median("dropped_ms"), theirs.median("restored_near_after_operations")) == (8000, 0)
    assert (ours.median("bound_ms"), ours.median("dropped_bound_ms")) == (1000, 4000)
    assert [row.median("time_ms") for row in every if row.peer == "zeropg"][1:] == [
        1e3 * each for each in slow_to_learn
    ]


def test_rows_compare_standstills_with_the_undisturbed_rate() -> None:
    result = {"seconds": {"zeropg": [2.0], "gloo": [4.0]}, "undisturbed": {"zeropg": [1.0], "gloo": [3.0]}}
    ours, theirs = rows(CASES["stopped"], result)
    assert (ours.median("percent_of_undisturbed"), theirs.median("percent_of_undisturbed")) == (50, 75)
    assert ours.median("faster_than_gloo") == 2


def test_the_table_has_a_line_per_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"seconds": {"zeropg": [[1.0]], "gloo": [[2.0]]}}
    write_results(tmp_path / "nodes.json", "nodes", rows(CASES["2x2"], result, (0.97,)), {"busy": False})
    assert program.main(["bench", "table", "--folder", str(tmp_path)]) == 0
    assert "| 2 nodes x 2 ranks, 200 Mbit/s | all_reduce | 954 MiB | 97 | 2 |" in capsys.readouterr().out


def test_a_file_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from zeropg.tools.bench.plot import plot_nodes

    times = {"zeropg": [[1.0] * 6], "gloo": [[2.0] * 6]}
    every = [*rows(CASES["2x2"], {"seconds": times}, (0.97,)), *rows(CASES["drop"], {"seconds": times}, (1.0, 4.0))]
    facts = {"rounds": 1, "busy": False, "cpu": "", "torch": "", "commit": "", "time": ""}
    for number, chosen in enumerate((every, every[:2], every[2:])):
        plot_nodes(facts, chosen, tmp_path / f"{number}.svg")
        assert (tmp_path / f"{number}.svg").read_text().lstrip().startswith("<?xml")


class Rates(dict[int, Any]):
    set_rate = dict.__setitem__


def test_ranks_get_their_plan_and_the_rates_that_they_wish_for(tmp_path: Path) -> None:
    plan = Plan((Point("all_reduce", 8),), "drop", 2, 0.5, 3, True, (1, "1mbit", None))
    dialogue, lab = Dialogue(tmp_path), Rates()
    dialogue.give(plan)
    assert dialogue.plan() == plan
    wishing = threading.Thread(target=dialogue.change_rate, args=(1, "1mbit", 10.0))
    wishing.start()
    while wishing.is_alive():
        dialogue.fulfil(lab)  # type: ignore[arg-type]
    assert lab == {1: "1mbit"}
    with pytest.raises(RuntimeError, match="did not give host 1 the rate None"):
        dialogue.change_rate(1, None, 0.05)


def test_results_count_when_they_are_whole(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    assert dialogue.results() == []
    assert dialogue.told() == 0
    dialogue.tell({"seconds": 1})
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"sec')
    assert dialogue.results() == [{"seconds": 1}]
    assert dialogue.told() == 1


STANDING = """
import runpy, sys, time
longest, begin = 0.0, time.monotonic()
with runpy.run_path(sys.argv[1])["standstills"]():
    last = begin
    while last < begin + 2.2:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
print(longest)
"""


def test_a_rank_that_stands_still_goes_on() -> None:
    command = [sys.executable, "-S", "-c", STANDING, standstills.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= standstills.LENGTH


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "5x5"], "no 5x5; there is all, 2x2"),
        (["--rounds", "0"], "--rounds must be positive"),
        (["--largest", "1X"], "'1X' is no size"),
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
    monkeypatch.setattr("zeropg.tools.bench.nodes.command.missing", lambda: "no tc (Debian: iproute2)")
    assert main(["--quick"]) == 2
    assert "no tc" in capsys.readouterr().err
