"""One lab for the tests of this folder; those that break a host make their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.lab.place import HostsPlace
from tests.spawn import RankPool
from zeropg.tools.lab.lab import Lab, missing


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Skips where hosts cannot be simulated."""
    reason = missing()
    if reason is not None:
        pytest.skip(f"no simulated hosts: {reason}")


@pytest.fixture(scope="session")
def lab(needs_lab: None) -> Iterator[Lab]:
    """Two hosts with links of 1 Gbit/s."""
    with Lab(hosts=2, rate="1gbit") as lab:
        yield lab


@pytest.fixture(scope="session")
def lab_pool(lab: Lab) -> Iterator[Callable[[str], RankPool]]:
    """lab_pool(backend) -> RankPool of 2 x 2 ranks on the hosts of `lab`; the last one lives on."""
    pools: dict[str, RankPool] = {}

    def get(backend: str) -> RankPool:
        for other in set(pools) - {backend}:
            pools.pop(other).close()
        return pools.setdefault(backend, RankPool(4, backend=backend, place=HostsPlace(lab, per_host=2)))

    yield get
    for pool in pools.values():
        pool.close()
