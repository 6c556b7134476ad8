"""`python -m zeropg simulate`: bytes on links meet the lower bounds, and what cannot be is refused."""

from __future__ import annotations

import json

import pytest

from zeropg import __main__ as program
from zeropg._native import _C


def simulate(capsys, *arguments: str) -> dict:
    assert program.main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def chosen(answer: dict) -> dict:
    (result,) = (entry for entry in answer["algorithms"] if entry["is_chosen"])
    return result


@pytest.mark.parametrize(("placement", "nodes"), [("2,2", 2), ("4,4", 2), ("2,2,2", 3), ("3,1,2", 3)])
def test_all_reduce_sends_what_it_must_between_nodes_and_no_more(capsys, placement, nodes):
    size = 3 << 20
    answer = simulate(capsys, "--placement", placement, "--size", str(size))
    for row in chosen(answer)["link_bytes"]:
        assert sum(row) == pytest.approx(2 * size * (nodes - 1) / nodes, rel=0.02)
    assert chosen(answer)["time_us"] >= 0.98 * answer["bound_us"]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather"])
@pytest.mark.parametrize("placement", ["3", "2,2", "1,2"])
def test_every_operation_runs_with_every_algorithm_that_serves_the_nodes(capsys, operation, placement):
    answer = simulate(capsys, "--op", operation, "--placement", placement, "--size", "64K")
    assert answer["algorithms"]
    for result in answer["algorithms"]:
        assert result["time_us"] > 0


@pytest.mark.parametrize("operation", _C.collective_operations(), ids=lambda operation: operation.name)
def test_every_operation_that_is_planned_runs(capsys, operation):
    answer = simulate(capsys, "--op", operation.name, "--placement", "2,2", "--size", "64K")
    assert chosen(answer)["time_us"] > 0
    assert answer["size_bytes"] == (64 << 10 if operation.has_tensors else 0)


def test_worlds_that_are_too_large_get_the_formulas_time(capsys):
    answer = simulate(capsys, "--ranks", "2048", "--nodes", "256", "--size", "1G")
    assert not chosen(answer)["is_simulated"] and chosen(answer)["time_us"] > answer["bound_us"]


def test_a_slow_node_makes_it_slower(capsys):
    even, uneven = (
        simulate(capsys, "--ranks", "4", "--nodes", "4", "--size", "1M", "--node-gbps", speeds)
        for speeds in ("1", "1,1,1,0.25")
    )
    assert chosen(uneven)["time_us"] > 2 * chosen(even)["time_us"]
    assert uneven["bound_us"] > 2 * even["bound_us"]


def test_a_table_shows_the_choice_and_the_links(capsys):
    assert program.main(["simulate", "--ranks", "4", "--size", "1M", "--links"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n* ") == 1 and "node 0 sends" in output and "lower bound" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "2", "--nodes", "3"], "each node has at least one rank"),
        (["--ranks", "4", "--node-gbps", "1,2,3"], "3 values for 2 nodes"),
        (["--ranks", "4", "--node-gbps", "0"], "must be positive"),
        (["--placement", "2,x"], "no list of numbers"),
    ],
)
def test_wrong_options_are_one_clear_error(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        program.main(["simulate", *arguments])
    assert exit_.value.code == 2 and words in capsys.readouterr().err
