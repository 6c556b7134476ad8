"""Racks, from the environment or a file, and the links between nodes, as groups find and measure them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import RankPool, SeparateHosts

HOSTS = (0, 0, 1, 2)  # of each rank: "host-0", ...
FILE = {
    "racks": [
        {"name": "near", "hosts": ["host-1", "host-0"], "node_gbps": 1.25, "uplink_gbps": 2.5},
        {"name": "far", "hosts": ["elsewhere", "host-2"], "node_gbps": 0.5, "uplink_gbps": 0.5},
    ]
}


def nothing() -> None:
    pass


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(len(HOSTS), backend=None, place=SeparateHosts(hosts=HOSTS)) as pool:
        yield pool


@pytest.fixture
def join(pool: RankPool, tmp_path: Path) -> Callable[..., list[Any]]:
    """join(options of each rank, what) makes a group and returns each rank's answer, or its error.

    Options in capitals are set in the environment.
    """

    def run(options: list[dict[str, Any]], what: Callable[[], Any] = nothing) -> list[Any]:
        path = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        return pool.run(join_and_ask, str(path), options, what, timeout=60)

    return run


def join_and_ask(path: str, options: list[dict[str, Any]], what: Callable[[], Any]) -> Any:
    import zeropg

    rank, size = int(os.environ["RANK"]), len(options)
    environment = {name: value for name, value in options[rank].items() if name.isupper()}
    given = {name: value for name, value in options[rank].items() if not name.isupper()}
    os.environ.update(environment)
    try:
        store = dist.FileStore(path, size)
        chosen = zeropg.BackendOptions(**given)
        dist.init_process_group("zeropg", store=store, rank=rank, world_size=size, pg_options=chosen)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        for name in environment:
            del os.environ[name]
    try:
        total = torch.ones(10_007)
        dist.all_reduce(total)
        assert total.eq(size).all()
        return what()
    finally:
        dist.destroy_process_group()


def racks_and_links() -> tuple[Any, ...]:
    import zeropg

    topology = zeropg.topology()
    return topology.rack_ids, topology.racks, topology.links, topology.uplinks, str(topology)


def test_a_rack_is_what_the_nodes_say(join: Callable[..., list[Any]]) -> None:
    for way in ("rack_id", "ZEROPG_RACK_ID"):
        for ids, nodes, *_, table in join([{way: rack} for rack in "bbab"], racks_and_links):
            assert (ids, nodes) == (["b", "a"], [[0, 2], [1]])
            assert "rack" in table.splitlines()[0]
    for ids, nodes, *_ in join([{}] * 4, racks_and_links):
        assert (ids, nodes) == ([], [])


def test_a_file_says_where_hosts_are_and_what_links_carry(join: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "racks.json"
    file.write_text(json.dumps(FILE))
    for way in ("topology_file", "ZEROPG_TOPOLOGY_FILE"):
        for ids, nodes, links, uplinks, table in join([{way: str(file)}] * 4, racks_and_links):
            assert (ids, nodes) == (["near", "far"], [[0, 1], [2]])
            assert (links, uplinks) == ([1.25, 1.25, 0.5], [2.5, 0.5])
            assert "rack far: 0.5 GB/s to other racks" in table


def with_first_rack(**changes: Any) -> str:
    return json.dumps({"racks": [FILE["racks"][0] | changes, FILE["racks"][1]]})


# By name: the file of each rank, its other options, and words that every rank's error has.
WRONG: dict[str, tuple[list[str], list[dict[str, Any]], list[str]]] = {
    "ranks of a node disagree": (
        [""] * 4,
        [{"rack_id": rack} for rack in "abaa"],
        ["ranks 0 and 1 share the node host-0", "rack a", "rack b", "ZEROPG_RACK_ID"],
    ),
    "a rank says nothing": (
        [""] * 4,
        [{"rack_id": rack} for rack in ("a", "a", "a", "")],
        ["rank 0 is in rack a, but rank 3 is in no rack"],
    ),
    "a host is missing": ([with_first_rack(hosts=["host-0"])] * 4, [{}] * 4, ["no rack has the host host-1", "rank 2"]),
    "a host stands twice": ([with_first_rack(hosts=["host-2"])] * 4, [{}] * 4, ["host 'host-2' is named twice"]),
    "it is no file": (["[]"] * 4, [{}] * 4, ["topology file", "expected '{'"]),
    "files differ": (
        [json.dumps(FILE)] * 2 + [json.dumps(FILE) + " "] * 2,
        [{}] * 4,
        ["the SHA-256 of the topology file is", "on rank 0 but", "on ranks 2, 3"],
    ),
    "not all have one": ([json.dumps(FILE)] * 3 + [""], [{}] * 4, ["topology file", "but none on rank 3"]),
    "it says another rack": (
        [json.dumps(FILE)] * 4,
        [{"rack_id": "near"}] * 4,
        ["host host-2 is in rack far, but ZEROPG_RACK_ID is near"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_an_error_on_every_rank(join: Callable[..., list[Any]], tmp_path: Path, case: str) -> None:
    texts, options, words = WRONG[case]
    options = [dict(of_rank) for of_rank in options]
    for rank, text in enumerate(texts):
        if text:
            file = tmp_path / f"racks{texts.index(text)}.json"
            file.write_text(text)
            options[rank]["topology_file"] = str(file)
    start = time.monotonic()
    for error in join(options):
        assert isinstance(error, str) and all(word in error for word in words), error
    assert time.monotonic() - start < 30, "no rank waits for its deadline"


def links_of_groups() -> tuple[list[list[float]], float]:
    import zeropg

    start = time.monotonic()
    same, smaller = dist.new_group(), dist.new_group([0, 2, 3])
    mine = [2, 3] if dist.get_rank() > 1 else [0, 1]
    split = dist.group.WORLD.split_group(mine, group_name=f"half{mine[0]}")  # type: ignore[union-attr]
    seconds = time.monotonic() - start
    groups = [None, same, *([smaller] if dist.get_rank() != 1 else [])]
    links = [zeropg.topology(group).links for group in groups]
    if dist.get_rank() > 1:
        links.append(zeropg.topology(split).links)
    return links, seconds


def test_links_are_measured_once_and_all_ranks_agree(join: Callable[..., list[Any]]) -> None:
    answers = join([{}] * 4, links_of_groups)
    measured = answers[0][0][0]
    assert len(measured) == 3 and all(0 < link < 100 for link in measured)
    for links, seconds in answers:
        assert links[0] == links[1] == measured
        assert seconds < 10
        assert all(set(of_group) <= set(measured) for of_group in links)
    assert answers[2][0][2] == measured


def test_links_are_not_measured_where_that_is_off_on_rank_0(join: Callable[..., list[Any]]) -> None:
    for _, _, links, *_ in join([{"measure_links": rank > 0} for rank in range(4)], racks_and_links):
        assert links == []


def gather_scatter_and_train() -> list[float]:
    import zeropg

    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (0, 1, 1003, 300_001):
        blocks = [torch.arange(numel, dtype=torch.float64) * (source + 1) for source in range(size)]
        gathered = torch.full((size * numel,), -1.0, dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, blocks[rank])
        assert torch.equal(gathered, torch.cat(blocks))
        own = torch.full((numel,), -1.0, dtype=torch.float64)
        dist.reduce_scatter_tensor(own, torch.cat(blocks) * (rank + 1))
        assert torch.equal(own, blocks[rank] * (size * (size + 1) // 2))
    torch.manual_seed(1)
    layers = [torch.nn.Linear(300, 300, dtype=torch.float64) for _ in range(4)]
    model = zeropg.fully_shard(torch.nn.Sequential(*layers), stage=3, units=[torch.nn.Linear])
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    losses = []
    for step in range(3):
        x = torch.randn(4, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_blocks_and_sharded_models_over_racks(join: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "racks.json"
    file.write_text(json.dumps(FILE))
    plain = join([{}] * 4, gather_scatter_and_train)
    for way in ({"topology_file": str(file)}, {"topology_file": str(file), "pool_bytes": 0}):
        for of_rank, expected in zip(join([way] * 4, gather_scatter_and_train), plain, strict=True):
            torch.testing.assert_close(of_rank, expected, rtol=1e-12, atol=0)
