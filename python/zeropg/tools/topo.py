"""`python -m zeropg topo`: which ranks share a node, and what the ways between them carry."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import zeropg
from zeropg.tools import machine

_DESCRIPTION = """
Shows which ranks share a node. Under torchrun it prints the topology of the group of all ranks, as zeropg.topology()
gives it; with --measure it also times messages between each pair of ranks, one pair at a time. Without torchrun it
shows this machine as one node.
"""
_EXAMPLES = """
examples:
  python -m zeropg topo                                                     this machine as one node
  torchrun --standalone --nproc-per-node 4 -m zeropg topo --measure         four ranks of this machine
  torchrun --nnodes 2 --nproc-per-node 4 ... -m zeropg topo --measure       before a run: are the links as expected?

Where the probe is wrong (containers that share a boot id), set ZEROPG_HOST_ID: ranks with equal values share a node.
ZEROPG_DOMAIN_ID does the same for ranks of a node that share a cache or the way to their memory (a domain). In the
output bars stand between domains.

status: 0; 2 wrong options
"""
_SMALL_BYTES = 8
_LARGE_BYTES = 1 << 20
_REPETITIONS = 10


def main(arguments: list[str]) -> int:
    """Print what `arguments` ask for; returns the exit status. Under torchrun every rank calls it."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("zeropg")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from torch's list of exports
        dist.init_process_group("zeropg", store=store, rank=0, world_size=1)
    topology = zeropg.topology()
    links = measure() if options.measure else {}
    facts = _facts()
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, facts)
    if dist.get_rank() == 0:
        nodes = [everybodys[ranks[0]] | {"ranks": ranks} for ranks in topology.nodes]
        if options.json:
            print(
                json.dumps({"world_size": topology.world_size, "nodes": nodes, "links": list(links.values())}, indent=2)
            )
        else:
            _print(topology, nodes, links)
    dist.destroy_process_group()
    return 0


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


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zeropg topo",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--measure", action="store_true", help="also time messages between each pair of ranks")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser.parse_args(arguments)
