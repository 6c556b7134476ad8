"""`python -m zeropg topo`: nodes, racks, what the ways between ranks carry, and what is planned from that."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import zeropg
from zeropg.backend import unwrapped_backend
from zeropg.tools import machine, quantities
from zeropg.tools.command_line import make_parser

_DESCRIPTION = """
Shows which ranks share a node and which nodes a rack, what the links between nodes carry, as they were measured when
the group was made, and which algorithm an all-reduce of each size gets, with what each one would take by the model of
these links. Under torchrun it shows the group of all ranks, as zeropg.topology() gives it; with --measure it also times
messages between each pair of ranks, one pair at a time. Without torchrun it shows this machine as one node.
"""
_EXAMPLES = """
examples:
  python -m zeropg topo                                                     this machine as one node
  torchrun --standalone --nproc-per-node 4 -m zeropg topo --measure         four ranks of this machine
  torchrun --nnodes 2 --nproc-per-node 4 ... -m zeropg topo --measure       before a run: are the links as expected?

Where the probe is wrong (containers that share a boot id), set ZEROPG_HOST_ID: ranks with equal values share a node.
ZEROPG_DOMAIN_ID does the same for ranks of a node that share a cache or the way to their memory (a domain). In the
output bars stand between domains. ZEROPG_RACK_ID says in which rack a node is, or ZEROPG_TOPOLOGY_FILE names a JSON
file that says it of all, by their host names:
  {"racks": [{"name": "a", "hosts": ["n1", "n2"], "uplink_gbps": 5}, {"name": "b", "hosts": ["n3"], "uplink_gbps": 5}]}
What it says of links (node_gbps, uplink_gbps, in 1e9 bytes/s) is believed and not measured.

status: 0; 2 wrong options
"""
Plans = dict[int, dict[str, tuple[float, bool]]]

_SMALL_BYTES = 8
_LARGE_BYTES = 1 << 20
_REPETITIONS = 10
_SIZES = [8 << (3 * step) for step in range(10)]  # of an all-reduce: 8 bytes to 1 GiB


def main(arguments: list[str]) -> int:
    """Print what `arguments` ask for; returns the exit status. Under torchrun every rank calls it."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        if "MASTER_ADDR" not in os.environ:
            print("zeropg topo: RANK is set, but not MASTER_ADDR; start it by torchrun, or unset RANK", file=sys.stderr)
            return 2
        dist.init_process_group("zeropg")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from torch's list of exports
        dist.init_process_group("zeropg", store=store, rank=0, world_size=1)
    topology = zeropg.topology()
    links = measure() if options.measure else {}
    planned = plans() if dist.get_rank() == 0 else {}
    facts = _facts()
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, facts)
    if dist.get_rank() == 0:
        nodes = [everybodys[ranks[0]] | {"ranks": ranks} for ranks in topology.nodes]
        if options.json:
            print(json.dumps(_answer(topology, nodes, planned) | {"links": list(links.values())}, indent=2))
        else:
            _print(topology, nodes, links)
            _print_plans(planned)
    dist.destroy_process_group()
    return 0


def plans() -> Plans:
    """By bytes of an all-reduce in fp32: what each algorithm would take in us, and whether it is chosen."""
    backend: Any = unwrapped_backend(dist.distributed_c10d._get_default_group(), torch.device("cpu"))
    return {size: backend.estimates("all_reduce", size) for size in _SIZES}


def _answer(topology: Any, nodes: list[dict[str, Any]], planned: Plans) -> dict[str, Any]:
    return {
        "world_size": topology.world_size,
        "nodes": nodes,
        "racks": [{"name": name, "nodes": of} for name, of in zip(topology.rack_ids, topology.racks, strict=True)],
        "node_gbps": topology.links,
        "uplink_gbps": topology.uplinks,
        "all_reduce": {
            size: {name: {"us": us, "is_chosen": is_chosen} for name, (us, is_chosen) in of.items()}
            for size, of in planned.items()
        },
    }


def measure() -> dict[tuple[int, int], dict[str, float]]:
    """Latency in us (half a round trip of 8 bytes) and bandwidth in GB/s (1 MiB) of each pair; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    links = {}
    for low in range(world_size):
        for high in range(low + 1, world_size):
            dist.barrier()
            answer = torch.zeros(2, dtype=torch.float64)
            if rank in (low, high):
                peer = high if rank == low else low
                small, large = (_round_trip_us(peer, rank == low, count) for count in (_SMALL_BYTES, _LARGE_BYTES))
                answer = torch.tensor([small / 2, 2 * _LARGE_BYTES / large / 1000], dtype=torch.float64)
            dist.broadcast(answer, src=low)
            latency, bandwidth = answer.tolist()
            links[low, high] = {"low": low, "high": high, "latency_us": latency, "gbps": bandwidth}
    return links


def _round_trip_us(peer: int, starts: bool, count: int) -> float:
    tensor = torch.zeros(count, dtype=torch.uint8)
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        for sends in (starts, not starts):
            if sends:
                dist.send(tensor, peer)
            else:
                dist.recv(tensor, peer)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def _facts() -> dict[str, Any]:
    total, _ = machine.memory_bytes()
    return {
        "hostname": os.uname().nodename,
        "cpu": machine.cpu_model(),
        "usable_cpus": machine.usable_cpus(),
        "memory_bytes": total,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def _print(topology: Any, nodes: list[dict[str, Any]], links: dict[tuple[int, int], dict[str, float]]) -> None:
    print(topology)
    for number, node in enumerate(nodes):
        print(
            f"node {number}: {node['hostname']}, {node['usable_cpus']:g} CPUs ({node['cpu']}), "
            f"{node['memory_bytes'] / 2**30:.0f} GiB, {node['gpus']} GPUs, {len(node['ranks'])} ranks"
        )
    if links:
        for key, title in (("latency_us", "us, 8 bytes one way"), ("gbps", "GB/s, 1 MiB one way")):
            print(f"\n{title}; rank by rank")
            print(f"{'':5}" + "".join(f" {rank:>9}" for rank in range(topology.world_size)))
            for low in range(topology.world_size):
                cells = (links.get((min(low, high), max(low, high))) for high in range(topology.world_size))
                print(f"{low:5}" + "".join(f" {cell[key]:9.2f}" if cell else f" {'-':>9}" for cell in cells))


def _print_plans(planned: Plans) -> None:
    names = list(dict.fromkeys(name for of in planned.values() for name in of))
    width = max(len(name) for name in names)
    print("\nall-reduce in fp32: us by the model of these links; a star marks what is chosen")
    print(f"{'':{width}}" + "".join(f" {quantities.size(size):>10}" for size in planned))
    for name in names:
        cells = (of.get(name) for of in planned.values())
        print(f"{name:{width}}" + "".join(f" {_time_text(cell):>10}" for cell in cells))


def _time_text(cell: tuple[float, bool] | None) -> str:
    return "-" if cell is None else f"{cell[0]:.0f}{'*' * cell[1]}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("topo", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--measure", action="store_true", help="also time messages between each pair of ranks")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser.parse_args(arguments)
