"""`python -m zeropg topo`, alone and on ranks."""

from __future__ import annotations

import json

from tests.commands import run_forked
from tests.spawn import SeparateHosts, run_ranks
from zeropg.tools.topo import measure, plans


def test_alone_it_shows_this_machine():
    done = run_forked("topo", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["world_size"] == 1 and answer["nodes"][0]["ranks"] == [0] and answer["links"] == []
    assert answer["racks"] == answer["node_gbps"] == answer["uplink_gbps"] == []
    assert [sum(one["is_chosen"] for one in of.values()) for of in answer["all_reduce"].values()] == [1] * 10


def test_on_two_ranks_it_shows_the_group_and_its_links():
    done = run_forked("topo", "--measure", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "us, 8 bytes one way" in done.stdout and "2 ranks" in done.stdout
    header, *rows = done.stdout.split("a star marks what is chosen\n")[1].splitlines()
    assert header.split()[:2] == ["8", "bytes"] and header.endswith("1 GiB")
    assert sum(row.count("*") for row in rows) == 10


def test_plans_follow_the_links_of_the_group():
    first, *others = run_ranks(3, plans, place=SeparateHosts(hosts=(0, 0, 1)))
    assert all(other == first for other in others)
    for of_size in first.values():
        (chosen,) = [name for name, (_, is_chosen) in of_size.items() if is_chosen]
        assert of_size[chosen][0] == min(us for us, _ in of_size.values()) > 0
    largest = max(first)
    assert min(us for us, _ in first[largest].values()) > 100 * min(us for us, _ in first[min(first)].values())


def test_every_pair_is_measured_and_all_ranks_agree():
    first, *others = run_ranks(3, measure, timeout=60)
    assert set(first) == {(0, 1), (0, 2), (1, 2)} and all(other == first for other in others)
    assert all(link["latency_us"] > 0 and link["gbps"] > 0 for link in first.values())
