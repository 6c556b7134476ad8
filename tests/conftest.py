"""Order of the suites and the pools of ranks that tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

# Ranks share a few cores; read when the forkserver (tests/spawn.py) loads torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.spawn import RankPool

# What says most in the least time runs first.
ORDER = (
    "test_layout.py",
    "test_install.py",
    "test_cpp.py",
    "test_spawn.py",
    "backend",
    "sharding",
    "train",
    "integration",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def key(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.relative_to(os.path.dirname(__file__)).parts[0]
        return item.get_closest_marker("slow") is not None, ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=key)  # stable: the order inside a suite stays


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., RankPool]]:
    """rank_pool(world_size, backend="zeropg") -> RankPool, kept for the whole session; at most two live at a time."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world_size: int, backend: str = "zeropg") -> RankPool:
        key = (world_size, backend)
        pool = pools.pop(key, None) or RankPool(world_size, backend=backend)
        pools[key] = pool  # the most recently used comes last
        while len(pools) > 2:
            pools.pop(next(iter(pools))).close()
        return pool

    yield get
    for pool in pools.values():
        pool.close()
