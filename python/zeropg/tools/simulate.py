"""`python -m zeropg simulate`: all ranks of a collective, on nodes and links that are only numbers."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zeropg._native import _C
from zeropg.tools.quantities import byte_count, size

_OPERATIONS = {traits.name: traits for traits in _C.collective_operations()}

_DESCRIPTION = """
Computes what one collective would cost on nodes that need not exist. It runs the schedules of all ranks in this
process, over a model of nodes and links. It counts the bytes on each link; the time is the model's: latency + bytes /
bandwidth per message, and barriers and memory within a node. It shows every algorithm that serves these nodes; * marks
the one that a group would choose. A schedule that is too large to run gets the time of the cost formula, and the output
says so.
"""
_EXAMPLES = """
examples:
  python -m zeropg simulate --ranks 8 --nodes 2 --size 64M                 all-reduce over 10 Gbit/s
  python -m zeropg simulate --ranks 8 --nodes 4 --node-gbps 1.25,1.25,1.25,0.6   one slow node
  python -m zeropg simulate --op all_gather --ranks 6 --placement 4,2      nodes of 4 and of 2 ranks
  python -m zeropg simulate --ranks 2048 --nodes 256 --size 1G             larger than any machine here
  python -m zeropg simulate --ranks 8 --nodes 2 --links                    bytes from each node to each other one

Sizes are nccl-tests': that of the whole buffer, of all blocks where an operation has blocks.

status: 0; 2 wrong options
"""


def main(arguments: list[str]) -> int:
    """Simulate as `arguments` say; returns the exit status. One process."""
    options, parser = _parse(arguments)
    nodes = _place(options.placement)
    world_size = sum(options.placement)
    block = _block_bytes(options, world_size)
    results = []
    try:
        chosen = _run(options, nodes, block, "")["algorithm"]
        for algorithm in _C.collective_algorithms(options.op):
            try:
                results.append(_run(options, nodes, block, algorithm))
            except ValueError:
                continue  # not for these nodes
    except ValueError as error:
        parser.error(str(error))
    bound = _bound_us(options, world_size)
    for result in results:
        result["is_chosen"] = result["algorithm"] == chosen
    if options.json:
        facts = {"operation": options.op, "size_bytes": _size(options, block, world_size), "nodes": nodes}
        print(json.dumps(facts | {"bound_us": bound, "algorithms": results}, indent=2))
    else:
        _print(options, results, bound, block, world_size)
    return 0


def _run(options: argparse.Namespace, nodes: list[list[int]], block: int, algorithm: str) -> dict[str, Any]:
    speeds = [1000 * gbps for gbps in options.node_gbps]
    return _C.simulate(
        options.op,
        block,
        nodes,
        element_bytes=4 if _OPERATIONS[options.op].has_tensors else 1,
        algorithm=algorithm,
        barrier_us=options.barrier_us,
        memory_bytes_per_us=1000 * options.memory_gbps,
        hop_us=options.hop_us,
        network_bytes_per_us=min(speeds),
        node_bytes_per_us=speeds,
    )


def _print(
    options: argparse.Namespace, results: list[dict[str, Any]], bound: float | None, block: int, world_size: int
) -> None:
    total = _size(options, block, world_size)
    speeds = "/".join(f"{gbps:g}" for gbps in dict.fromkeys(options.node_gbps))
    print(
        f"{options.op} of {size(total)} (float32) on {world_size} ranks, nodes of "
        f"{','.join(map(str, options.placement))}; {speeds} GB/s and {options.hop_us:g} us between nodes"
    )
    if bound is not None:
        print(f"lower bound of the links between nodes: {bound:.1f} us")
    print(
        f"\n  {'algorithm':34} {'time us':>12} {'algbw GB/s':>11} {'busiest link':>13} {'all links':>11} {'%bound':>7}"
    )
    for result in results:
        took, matrix = result["time_us"], result["link_bytes"]
        out = [sum(row) for row in matrix]
        into = [sum(row[node] for row in matrix) for node in range(len(matrix))]
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
        print("too many steps to simulate: times are the cost formula's")


def _place(placement: list[int]) -> list[list[int]]:
    nodes, first = [], 0
    for ranks in placement:
        nodes.append(list(range(first, first + ranks)))
        first += ranks
    return nodes


def _block_bytes(options: argparse.Namespace, world_size: int) -> int:
    if not _OPERATIONS[options.op].has_tensors:
        return 0
    total: int = options.size
    return max(4, total // _blocks(options, world_size) // 4 * 4)


def _size(options: argparse.Namespace, block: int, world_size: int) -> int:
    return block * _blocks(options, world_size)


def _blocks(options: argparse.Namespace, world_size: int) -> int:
    """How many blocks the buffer has that --size is about."""
    return world_size if _OPERATIONS[options.op].has_blocks else 1


def _bound_us(options: argparse.Namespace, world_size: int) -> float | None:
    """The least time that the nodes' links allow; None for one node and where no formula is known.

    All-reduce: every node must send and receive the whole once, and 2 (nodes - 1) wholes must cross in all. All-gather
    and reduce-scatter: a node receives (sends) what the others have. Broadcast: each other node receives all.
    """
    speeds: list[float] = [1000 * gbps for gbps in options.node_gbps]
    count, total = len(speeds), _size(options, _block_bytes(options, world_size), world_size)
    if count == 1:
        return None
    if options.op == "all_reduce":
        return max(total / min(speeds), 2 * (count - 1) * total / sum(speeds))
    if options.op in ("all_gather", "reduce_scatter"):
        others: list[float] = [total * (world_size - ranks) / world_size for ranks in options.placement]
        return max(part / speed for part, speed in zip(others, speeds, strict=True))
    return total / min(speeds) if options.op == "broadcast" else None


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m zeropg simulate",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what")
    what.add_argument("--op", choices=_OPERATIONS, default="all_reduce", help="operation (default all_reduce)")
    what.add_argument("--size", type=byte_count, default=16 << 20, help="bytes of the buffer: 64K, 16M (default 16M)")
    where = parser.add_argument_group("where")
    where.add_argument("-n", "--ranks", type=int, default=8, help="ranks in all (default 8)")
    where.add_argument("--nodes", type=int, default=2, help="nodes, over which the ranks are spread evenly (default 2)")
    where.add_argument(
        "--placement", type=_numbers(int), help="ranks of each node, in place of --ranks and --nodes: 4,4,2"
    )
    where.add_argument(
        "--node-gbps",
        type=_numbers(float),
        default=[1.25],
        help="1e9 bytes/s of a node's link; one for all, or one each: 1.25,0.6 (default 1.25)",
    )
    where.add_argument("--hop-us", type=float, default=30.0, help="us of latency between nodes (default 30: TCP)")
    where.add_argument(
        "--memory-gbps", type=float, default=20.0, help="1e9 bytes/s that a core copies, read plus written (default 20)"
    )
    where.add_argument("--barrier-us", type=float, default=2.0, help="us of a barrier of a node's ranks (default 2)")
    output = parser.add_argument_group("output")
    output.add_argument("--links", action="store_true", help="also print the bytes from each node to each other node")
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    if options.placement is None:
        if not 1 <= options.nodes <= options.ranks:
            parser.error(f"--nodes {options.nodes} with --ranks {options.ranks}: each node has at least one rank")
        whole, rest = divmod(options.ranks, options.nodes)
        options.placement = [whole + (node < rest) for node in range(options.nodes)]
    if len(options.node_gbps) == 1:
        options.node_gbps = options.node_gbps * len(options.placement)
    if len(options.node_gbps) != len(options.placement):
        parser.error(f"--node-gbps has {len(options.node_gbps)} values for {len(options.placement)} nodes")
    if (
        min(*options.node_gbps, options.memory_gbps, *options.placement) <= 0
        or min(options.hop_us, options.barrier_us) < 0
    ):
        parser.error("bandwidths and ranks must be positive, latencies not negative")
    return options, parser


def _numbers(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None

    return parse
