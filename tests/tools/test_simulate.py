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


def test_large_worlds_are_simulated_too(capsys):
    answer = simulate(capsys, "--nodes", "256", "--ranks-per-node", "8", "--size", "1GiB")
    assert len(answer["nodes"]) == 256 and len(answer["nodes"][0]) == 8
    assert chosen(answer)["is_simulated"]
    assert 1 <= chosen(answer)["time_us"] / answer["bound_us"] < 1.5
    sent = sum(chosen(answer)["link_bytes"][17])
    assert sent == pytest.approx(2 * (1 << 30) * 255 / 256, rel=0.01)


def test_what_is_too_large_gets_the_formulas_time(capsys):
    answer = simulate(capsys, "--op", "reduce", "--nodes", "512", "--ranks-per-node", "8", "--size", "1G")
    assert not chosen(answer)["is_simulated"] and chosen(answer)["time_us"] > 0


def test_a_cost_per_message_counts_where_messages_are_many(capsys):
    free, dear = (
        simulate(capsys, "--nodes", "64", "--ranks-per-node", "1", "--size", "64K", "--message-us", cost)
        for cost in ("0", "27")
    )
    assert chosen(dear)["time_us"] > 2 * chosen(free)["time_us"]


def test_a_comparison_has_a_column_per_size_and_can_be_drawn(capsys, tmp_path):
    arguments = ["simulate", "--nodes", "4", "--ranks-per-node", "2", "--size", "1M", "--compare"]
    assert program.main(arguments) == 0
    output = capsys.readouterr().out
    assert "4 KiB" in output and "1 MiB" in output and output.count("all_reduce_hierarchical ") == 1
    assert "lower bound of the links" in output
    pytest.importorskip("matplotlib")
    assert program.main([*arguments, "--plot", str(tmp_path / "compared.svg")]) == 0
    assert "<svg" in (tmp_path / "compared.svg").read_text()


RACKS = """
[[racks]]
name = "a"
nodes = 4
uplink_gbps = 0.5

[[racks]]
name = "b"
hosts = ["node1", "node2"]
node_gbps = 2.5
uplink_gbps = 0.5
"""


def test_racks_have_nodes_links_and_uplinks_of_their_own(capsys, tmp_path):
    file = tmp_path / "racks.toml"
    file.write_text(RACKS.replace("0.5", "0.25"))
    options = ["--topology", str(file), "--ranks-per-node", "2", "--size", "1M"]
    slow = simulate(capsys, *options)
    assert [len(node) for node in slow["nodes"]] == [2] * 6
    file.write_text(RACKS.replace("0.5", "500"))
    fast = simulate(capsys, *options)
    assert chosen(slow)["time_us"] > 2 * chosen(fast)["time_us"]
    assert slow["bound_us"] == pytest.approx((1 << 20) / 250) and slow["bound_us"] > fast["bound_us"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no racks"),
        ("[[racks]", "neither TOML nor JSON"),
        ('{"racks": []}', "it has no racks"),
        ('{"racks": [{"name": "a"}]}', "needs either hosts, a list of names, or nodes"),
        ('{"racks": [{"name": "a", "nodes": 0}]}', "expected a number of at least 1"),
        ('{"racks": [{"name": "a", "nodes": 1}, {"name": "a", "nodes": 1}]}', "two racks are called 'a'"),
        ('{"racks": [{"name": "a", "hosts": ["x"]}, {"name": "b", "hosts": ["x"]}]}', "host 'x' is named twice"),
        ('{"racks": [{"name": "a", "nodes": 1, "speed": 1}]}', "has the key 'speed'"),
        ('{"racks": [{"name": "a", "nodes": 1, "uplink_gbps": -1}]}', "expected a number of 1e9 bytes/s"),
        ('{"racks": [7]}', "expected '{'"),
    ],
)
def test_a_topology_file_that_contradicts_itself_is_one_clear_error(capsys, tmp_path, text, words):
    file = tmp_path / "racks"
    file.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        program.main(["simulate", "--topology", str(file)])
    assert exit_.value.code == 2 and words in capsys.readouterr().err


def test_a_topology_file_stands_alone(capsys, tmp_path):
    with pytest.raises(SystemExit):
        program.main(["simulate", "--topology", str(tmp_path / "none")])
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main(["simulate", "--topology", str(tmp_path / "none"), "--nodes", "2"])
    assert "leave out --nodes" in capsys.readouterr().err


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
        (["--placement", "2,2", "--nodes", "3"], "leave out --nodes"),
        (["--message-us", "nan"], "all finite"),
        (["--compare", "--plot", "x.txt"], "neither an .svg nor a .png"),
    ],
)
def test_wrong_options_are_one_clear_error(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        program.main(["simulate", *arguments])
    assert exit_.value.code == 2 and words in capsys.readouterr().err
