"""Links between hosts, as a group measures them when it is made, and follows them while it works."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from tests.lab.place import HostsPlace
from tests.spawn import RankPool, run_ranks
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]
MBIT = 1e6 / 8 / 1e9  # of 1 Mbit/s, in GB/s


def measured() -> tuple[list[float], list[float]]:
    import zeropg

    topology = zeropg.topology()
    return topology.links, topology.uplinks


ATTEMPTS = 4


def expect_links(lab: Lab, links: Sequence[float], uplinks: Sequence[float] = (), *, within: float) -> list[float]:
    """Returns what a group measures, which is `links` and `uplinks`, as a share `within` of them.

    Other programs on these processors make links look slower, never faster: no group sees them too fast, and one of a
    few sees them right.
    """
    expected = [*links, *uplinks]
    for _ in range(ATTEMPTS):
        answers = run_ranks(len(links), measured, place=HostsPlace(lab, per_host=1))
        assert all(answer == answers[0] for answer in answers)
        found = [*answers[0][0], *answers[0][1]]
        assert all(one < (1 + within) * other for one, other in zip(found, expected, strict=True)), found
        if found == pytest.approx(expected, rel=within):
            return answers[0][0]
    raise AssertionError(f"{found}, expected {expected}")


def test_a_link_at_half_speed_is_found_though_buckets_are_full() -> None:
    rates = [200, 200, 100, 200]
    with Lab(hosts=4, rate=[f"{rate}mbit" for rate in rates]) as lab:
        links = expect_links(lab, [rate * MBIT for rate in rates], within=0.15)
    assert links[0] == links[1] == links[3]


def test_links_that_are_alike_count_as_equal() -> None:
    for rate, hosts, per_host in (("100mbit", 3, 2), (None, 4, 1)):
        with Lab(hosts=hosts, rate=rate) as lab:
            answers = run_ranks(hosts * per_host, measured, place=HostsPlace(lab, per_host))
        assert all(answer == answers[0] for answer in answers)
        links, _ = answers[0]
        # Where the processors are the limit, so little may come that nothing is known, which counts as equal too.
        assert (len(links) == hosts and len(set(links)) == 1) or (rate is None and not links)


def test_an_uplink_that_is_slower_than_its_nodes_is_found() -> None:
    with Lab(hosts=4, rate="200mbit", racks=2, uplink="50mbit") as lab:
        expect_links(lab, [200 * MBIT] * 4, [50 * MBIT] * 2, within=0.2)


SIZE = 3 << 20


def reduced(operations: int, asynchronous: bool) -> tuple[list[float], set[str]]:
    """The links after so many all-reduces of the same tensors, and the digests of their results."""
    import zeropg

    numbers = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(SIZE // 4, generator=numbers)
    results = [values.clone() for _ in range(operations)]
    works = [dist.all_reduce(result, async_op=asynchronous) for result in results]
    for work in works:
        if work is not None:
            work.wait()
    return zeropg.topology().links, {hashlib.sha256(result.numpy().tobytes()).hexdigest() for result in results}


def test_shares_follow_a_link_that_slows_down_and_recovers_with_the_same_bits() -> None:
    with Lab(hosts=4, rate="200mbit") as lab, RankPool(4, place=HostsPlace(lab, per_host=1)) as pool:

        def links_and_digest(operations: int, *, asynchronous: bool = False) -> tuple[list[float], str]:
            answers = pool.run(reduced, operations, asynchronous)
            assert all(answer == answers[0] for answer in answers)
            links, digests = answers[0]
            (digest,) = digests
            return links, digest

        def sizes_sent_by_last(operations: int) -> float:
            before = lab.interface_bytes(3).tx
            links_and_digest(operations)
            return (lab.interface_bytes(3).tx - before) / operations / SIZE

        links, digest = links_and_digest(4)
        assert len(set(links)) == 1
        assert sizes_sent_by_last(2) == pytest.approx(1.5, abs=0.2)
        lab.set_rate(3, "50mbit")
        links, dropped = links_and_digest(12)
        assert dropped == digest
        assert links[3] < 0.8 * min(links[:3]) and len(set(links[:3])) == 1
        assert sizes_sent_by_last(2) == pytest.approx(1, abs=0.2)
        lab.set_rate(3, "200mbit")
        # All of them are planned before the first has run.
        links, restored = links_and_digest(12, asynchronous=True)
        assert restored == digest
        assert len(set(links)) == 1
        assert sizes_sent_by_last(2) == pytest.approx(1.5, abs=0.2)
