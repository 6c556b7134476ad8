"""`python -m zeropg simulate`: all ranks of a collective, on nodes and links that are only numbers."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from zeropg._native import _C
from zeropg.tools.bench.nodes.bounds import all_reduce_seconds, blocks_seconds
from zeropg.tools.command_line import make_parser
from zeropg.tools.plot_simulated import plot_comparison
from zeropg.tools.quantities import byte_count, plot_file, size
from zeropg.tools.simulated_racks import Racks, read_racks

_OPERATIONS = {traits.name: traits for traits in _C.collective_operations()}

_DESCRIPTION = """
Computes what one collective would cost on nodes that need not exist. It runs the schedules of all ranks in this
process, over a model of nodes and links. It counts the bytes on each link; the time is the model's: latency + bytes /
bandwidth per message, the CPU time of messages, and barriers and memory within a node. It shows every algorithm that
serves these nodes; * marks the one that a group would choose. In large groups one node stands for all that are like it,
where the schedule is the same from every node on, and long loops are not run to their end. What is still too large gets
the time of the cost formula, and the output says so.
"""
_EXAMPLES = """
examples:
  python -m zeropg simulate --ranks 8 --nodes 2 --size 64M                 all-reduce over 10 Gbit/s
  python -m zeropg simulate --ranks 8 --nodes 4 --node-gbps 1.25,1.25,1.25,0.6   one slow node
  python -m zeropg simulate --op all_gather --ranks 6 --placement 4,2      nodes of 4 and of 2 ranks
  python -m zeropg simulate --nodes 256 --ranks-per-node 8 --size 1G       larger than any machine here
  python -m zeropg simulate --nodes 512 --ranks-per-node 8 --size 1G --compare --plot all_reduce.svg
  python -m zeropg simulate --topology racks.toml --ranks-per-node 8       racks with links and uplinks of their own
  python -m zeropg simulate --ranks 8 --nodes 2 --links                    bytes from each node to each other one

Sizes are nccl-tests': that of the whole buffer, of all blocks where an operation has blocks.

A topology file is TOML or JSON; each rack has a name and hosts or a number of nodes, and may have speeds:
  [[racks]]
  name = "a"
  nodes = 16           # or hosts = ["node1", "node2"]
  node_gbps = 1.25     # 1e9 bytes/s of each node's link; without it --node-gbps
  uplink_gbps = 5.0    # 1e9 bytes/s of the rack's way to other racks; without it as much as its nodes send

status: 0; 2 wrong options
"""


def main(arguments: list[str]) -> int:
    """Simulate as `arguments` say; returns the exit status. One process."""
    options, parser = _parse(arguments)
    try:
        tables = [_simulate(options, total) for total in _sizes(options)]
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(tables if options.compare else tables[0], indent=2))
    elif options.compare:
        _print_comparison(options, tables)
    else:
        _print(options, tables[0])
    if options.plot is not None:
        plot_comparison(tables, _describe(options), options.plot)
    return 0


def _sizes(options: argparse.Namespace) -> list[int]:
    """The size; to compare, also smaller ones, down to 4 KiB."""
    sizes = [options.size]
    while options.compare and options.op != "barrier" and sizes[0] >= 16 * 4096:
        sizes.insert(0, sizes[0] // 16)
    return sizes


def _simulate(options: argparse.Namespace, total: int) -> dict[str, Any]:
    """Every algorithm that serves the nodes, for `total` bytes."""
    nodes = _place(options.placement)
    world_size = sum(options.placement)
    block = _block_bytes(options.op, total, world_size)
    results = []
    for algorithm in _C.collective_algorithms(options.op):
        try:
            results.append(_run(options, nodes, block, algorithm))
        except ValueError:
            continue  # not for these nodes
    if not results:
        _run(options, nodes, block, "")  # which says why
    total = _total_bytes(options.op, block, world_size)
    facts = {"operation": options.op, "size_bytes": total, "nodes": nodes}
    return facts | {"bound_us": _bound_us(options, total), "algorithms": results}


def _run(options: argparse.Namespace, nodes: list[list[int]], block: int, algorithm: str) -> dict[str, Any]:
    racks: Racks | None = options.topology
    return _C.simulate(
        options.op,
        block,
        nodes,
        algorithm=algorithm,
        element_bytes=4 if _OPERATIONS[options.op].has_tensors else 1,
        barrier_us=options.barrier_us,
        memory_bytes_per_us=1000 * options.memory_gbps,
        hop_us=options.hop_us,
        message_us=options.message_us,
        network_bytes_per_us=1000 * min(options.node_gbps),
        node_bytes_per_us=[1000 * gbps for gbps in options.node_gbps],
        racks=racks.nodes if racks else [],
        uplink_bytes_per_us=[1000 * gbps for gbps in racks.uplink_gbps] if racks else [],
    )


def _describe(options: argparse.Namespace) -> str:
    placement = [str(ranks) for ranks in options.placement]
    if len(set(placement)) == 1:
        nodes = f"{len(placement)} nodes of {placement[0]}"
    else:
        nodes = "nodes of " + ",".join(placement)
    speeds = "/".join(f"{gbps:g}" for gbps in dict.fromkeys(options.node_gbps))
    racks = f" in {len(options.topology.uplink_gbps)} racks" if options.topology else ""
    return (
        f"{sum(options.placement)} ranks, {nodes}{racks}; {speeds} GB/s and {options.hop_us:g} us between nodes, "
        f"{options.message_us:g} us of CPU per message"
    )


def _print(options: argparse.Namespace, table: dict[str, Any]) -> None:
    total, bound, results = table["size_bytes"], table["bound_us"], table["algorithms"]
    print(f"{options.op} of {size(total)} (float32): {_describe(options)}")
    if bound is not None:
        print(f"lower bound of the links between nodes: {bound:.1f} us")
    print(
        f"\n  {'algorithm':34} {'time us':>12} {'algbw GB/s':>11} {'busiest link':>13} {'all links':>11} {'%bound':>7}"
    )
    for result in results:
        took, matrix = result["time_us"], result["link_bytes"]
        out = [sum(row) for row in matrix]
        into = [sum(column) for column in zip(*matrix, strict=True)]
        share = f"{100 * bound / took:7.1f}" if bound and took > 0 else f"{'-':>7}"
        busiest, everything = size(max([0, *out, *into])), size(sum(out))
        if not result["is_simulated"]:
            busiest = everything = "unknown"
        print(
            f"{'*' if result['is_chosen'] else ' '} {result['algorithm']:34} {took:12.1f} "
            f"{total / took / 1000 if took > 0 else 0:11.2f} {busiest:>13} {everything:>11} {share}"
        )
        if options.links and len(matrix) > 1:
            for sender, row in enumerate(matrix):
                print(f"    node {sender} sends " + "  ".join(f"{size(count):>10}" for count in row))
    if not all(result["is_simulated"] for result in results):
        print("too large to simulate: times are the cost formula's")


def _print_comparison(options: argparse.Namespace, tables: list[dict[str, Any]]) -> None:
    """One row per algorithm, one column per size: milliseconds, * where a group would choose it."""
    print(f"{options.op}, ms: {_describe(options)}\n")
    print(f"  {'algorithm':34}" + "".join(f" {size(table['size_bytes']):>11}" for table in tables))
    names = dict.fromkeys(result["algorithm"] for table in tables for result in table["algorithms"])
    for name in names:
        cells = []
        for table in tables:
            found = [result for result in table["algorithms"] if result["algorithm"] == name]
            text = f"{found[0]['time_us'] / 1000:#.4g}".rstrip(".") if found else "-"
            cells.append(f" {('*' if found and found[0]['is_chosen'] else '') + text:>11}")
        print(f"  {name:34}" + "".join(cells))
    if tables[0]["bound_us"] is not None:
        print(f"  {'lower bound of the links':34}" + "".join(f" {table['bound_us'] / 1000:>11.4g}" for table in tables))
    print("\n* the one that a group would choose")


def _place(placement: list[int]) -> list[list[int]]:
    nodes, first = [], 0
    for ranks in placement:
        nodes.append(list(range(first, first + ranks)))
        first += ranks
    return nodes


def _block_bytes(operation: str, total: int, world_size: int) -> int:
    if not _OPERATIONS[operation].has_tensors:
        return 0
    return max(4, total // _blocks(operation, world_size) // 4 * 4)


def _total_bytes(operation: str, block: int, world_size: int) -> int:
    return block * _blocks(operation, world_size)


def _blocks(operation: str, world_size: int) -> int:
    """How many blocks the buffer has that --size is about."""
    return world_size if _OPERATIONS[operation].has_blocks else 1


def _bound_us(options: argparse.Namespace, total: int) -> float | None:
    """The least time that the nodes' links allow; None for one node and where no formula is known.

    All-reduce: every node must send and receive the whole once, and 2 (nodes - 1) wholes must cross in all. All-gather
    and reduce-scatter: a node receives (sends) what the others have, and each block must cross to all others.
    Broadcast: each other node receives all. The same holds for racks and their uplinks.
    """
    levels: list[tuple[list[float], list[int]]] = [([1000 * gbps for gbps in options.node_gbps], options.placement)]
    if len(options.node_gbps) == 1:
        return None
    if options.topology and len(options.topology.uplink_gbps) > 1:
        ranks = [sum(options.placement[node] for node in nodes) for nodes in options.topology.nodes]
        levels.append(([1000 * gbps for gbps in options.topology.uplink_gbps], ranks))
    if options.op == "all_reduce":
        return max(all_reduce_seconds(total, rates) for rates, _ in levels)
    if options.op in ("all_gather", "reduce_scatter"):
        return max(blocks_seconds(total, rates, ranks) for rates, ranks in levels)
    return max(total / min(rates) for rates, _ in levels) if options.op == "broadcast" else None


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = make_parser("simulate", _DESCRIPTION, _EXAMPLES)
    what = parser.add_argument_group("what")
    what.add_argument("--op", choices=_OPERATIONS, default="all_reduce", help="operation (default all_reduce)")
    what.add_argument("--size", type=byte_count, default=16 << 20, help="bytes of the buffer: 64K, 16M (default 16M)")
    where = parser.add_argument_group("where")
    where.add_argument("-n", "--ranks", type=int, default=8, help="ranks in all (default 8)")
    where.add_argument("--nodes", type=int, help="nodes, over which the ranks are spread evenly (default 2)")
    where.add_argument("--ranks-per-node", type=int, help="ranks of every node, in place of --ranks")
    where.add_argument(
        "--topology", type=Path, metavar="FILE", help="racks, their nodes and links, in place of --nodes (see below)"
    )
    where.add_argument(
        "--placement", type=_numbers(int), help="ranks of each node, in place of --ranks and --nodes: 4,4,2"
    )
    where.add_argument(
        "--node-gbps",
        type=_numbers(float),
        default=[1.25],
        help="1e9 bytes/s of a node's link; one for all, or one each: 1.25,0.6 (default 1.25)",
    )
    where.add_argument(
        "--message-us",
        type=float,
        default=27.0,
        help="us of CPU per message between nodes, both ends (default 27: TCP)",
    )
    where.add_argument("--hop-us", type=float, default=30.0, help="us of latency between nodes (default 30: TCP)")
    where.add_argument(
        "--memory-gbps", type=float, default=20.0, help="1e9 bytes/s that a core copies, read plus written (default 20)"
    )
    where.add_argument("--barrier-us", type=float, default=2.0, help="us of a barrier of a node's ranks (default 2)")
    output = parser.add_argument_group("output")
    output.add_argument("--links", action="store_true", help="also print the bytes from each node to each other node")
    output.add_argument(
        "--compare", action="store_true", help="all algorithms at sizes from 4 KiB up to --size, in one table"
    )
    output.add_argument("--plot", type=plot_file, metavar="FILE", help="also draw it: .svg or .png (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    _settle(options, parser)
    return options, parser


def _settle(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Placement and link speeds of each node, from the options that say them in other ways."""
    if options.topology is not None:
        if options.nodes is not None or options.placement is not None:
            parser.error("--topology says which nodes there are; leave out --nodes and --placement")
        try:
            options.topology = read_racks(options.topology, options.node_gbps[0])
        except ValueError as error:
            parser.error(f"--topology {options.topology}: {error}")
        options.node_gbps = options.topology.node_gbps
    if options.placement is not None and options.nodes is not None:
        parser.error("--placement says how many nodes there are; leave out --nodes")
    if options.placement is None:
        count = len(options.topology.node_gbps) if options.topology else 2 if options.nodes is None else options.nodes
        ranks = options.ranks if options.ranks_per_node is None else options.ranks_per_node * count
        if not 1 <= count <= ranks:
            parser.error(f"--nodes {count} with --ranks {ranks}: each node has at least one rank")
        whole, rest = divmod(ranks, count)
        options.placement = [whole + (node < rest) for node in range(count)]
    if len(options.node_gbps) == 1:
        options.node_gbps = options.node_gbps * len(options.placement)
    if len(options.node_gbps) != len(options.placement):
        parser.error(f"--node-gbps has {len(options.node_gbps)} values for {len(options.placement)} nodes")
    positive = (*options.node_gbps, options.memory_gbps, *options.placement)
    latencies = (options.hop_us, options.barrier_us, options.message_us)
    if not (all(0 < each < math.inf for each in positive) and all(0 <= each < math.inf for each in latencies)):
        parser.error("bandwidths and ranks must be positive, latencies not negative, and all finite")


def _numbers(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None

    return parse
