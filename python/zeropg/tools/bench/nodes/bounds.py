"""The least seconds that a collective takes on given links, whatever its algorithm.

Links carry both directions at once. Ranks of a node exchange their data for nothing, so a node counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Bytes/s of each node's link, and of each rack's uplink; racks hold equal numbers of nodes, in order."""

    nodes: tuple[float, ...]
    uplinks: tuple[float, ...] = ()


def bound_seconds(operation: str, size: int, links: Links, ranks: Sequence[int]) -> float:
    """Of `size` bytes, as nccl-tests counts them, on nodes of so many `ranks` each.

    What binds nodes to their links binds racks to their uplinks: the slower of the two is the bound.
    """
    per_rack = len(ranks) // max(1, len(links.uplinks))
    in_racks = [sum(ranks[first : first + per_rack]) for first in range(0, len(ranks), per_rack)]
    levels = [(links.nodes, ranks)] + ([(links.uplinks, in_racks)] if links.uplinks else [])
    if operation == "all_reduce":
        return max(all_reduce_seconds(size, rates) for rates, _ in levels)
    return max(blocks_seconds(size, rates, counts) for rates, counts in levels)


def all_reduce_seconds(size: int, rates: Sequence[float]) -> float:
    """A node that reduces the share f sends the rest once and its result to all others: 1 + (m - 2) f sizes.

    With the best shares (f >= 0, sum 1) either all links are busy to the end with their 2 (m - 1) sizes, or one link is
    so slow that its node reduces nothing, and sends and receives one size.
    """
    return size * max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))


def blocks_seconds(size: int, rates: Sequence[float], ranks: Sequence[int]) -> float:
    """Of a reduce-scatter, and of an all-gather, which is the same backwards.

    A node whose ranks own the share s sends of all other blocks what it has, 1 - s, and receives its own, s; all links
    together carry each block m - 1 times.
    """
    shares = [count / sum(ranks) for count in ranks]
    alone = max(max(share, 1 - share) / rate for share, rate in zip(shares, rates, strict=True))
    return size * max(alone, (len(rates) - 1) / sum(rates))


def links_of(streams: Sequence[tuple[int, int]], rates: Sequence[float], racks: int) -> Links:
    """What links carry, from (sender, receiver) and bytes/s of streams that ran at the same time, some over each link.

    A stream is as fast as the slowest link on its way. So a link has the rate of its fastest stream, and an uplink that
    of all streams in its busier direction.
    """
    pairs = list(zip(streams, rates, strict=True))
    nodes = 1 + max(max(stream) for stream in streams)
    links = tuple(max(rate for stream, rate in pairs if node in stream) for node in range(nodes))
    if racks == 1:
        return Links(links)
    ways: list[list[float]] = [[0.0, 0.0] for _ in range(racks)]
    for stream, rate in pairs:
        sender, receiver = (node * racks // nodes for node in stream)
        if sender != receiver:
            ways[sender][0] += rate
            ways[receiver][1] += rate
    return Links(links, tuple(max(both) for both in ways))
