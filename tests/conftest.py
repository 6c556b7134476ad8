"""Order of the suites and the pools of ranks that tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Ranks share a few cores; read when the forkserver (tests/spawn.py) loads torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import retries
from tests.spawn import THIS_MACHINE, Place, RankPool

# What says most in the least time runs first.
ORDER = [
    "test_layout.py",
    "test_install.py",
    "test_stubs.py",
    "test_cpp.py",
    "cpp_program",
    "test_spawn.py",
    "backend",
    "compression",
    "sharding",
    "tensor_parallel",
    "deepspeed",
    "train",
    "tools",
    "integration",
    "lab",
]
# Where one version of torch can differ from another: the few minutes that `make smoke` takes.
SMOKE = (
    "test_layout.py",
    "test_install.py",
    "cpp_program",
    "backend/bootstrap",
    "backend/engine",
    "backend/p2p",
    "backend/process_group",
    "sharding/module/test_same_losses.py",
    "sharding/uses/test_uses.py",
    "tensor_parallel/test_train.py",
    "tensor_parallel/test_programs.py",
    "integration/test_ddp.py",
    "integration/test_fsdp2.py",
)
# What goes on with new seeds for ZEROPG_PROGRAM_SECONDS, and what is long: `make soak` runs all of these.
CAMPAIGN = (
    "backend/diagnostics/test_blame.py",
    "backend/faults/test_faults.py",
    "backend/process_group/test_random_programs.py",
    "lab/test_random_faults.py",
    "sharding/uses",
)
# What measures how fast something is.
ALONE = (
    "lab/test_compression.py",
    "lab/test_lab.py",
    "lab/test_links.py",
    "lab/test_training.py",
    "backend/bootstrap/test_racks_and_links.py",
    "tools/test_bench_nodes.py",
)
# What stops processes, and counts the seconds until others notice.
TIMED = (
    "test_spawn.py",
    "lab",
    "backend/diagnostics",
    "backend/faults",
    "sharding/offload/test_bad_disk.py",
    "tools/test_bench.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(retries)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent

    def key(item: pytest.Item) -> tuple[bool, int]:
        first = item.path.relative_to(tests).parts[0]
        return item.get_closest_marker("slow") is not None, ORDER.index(first) if first in ORDER else len(ORDER)

    items.sort(key=key)  # stable: the order inside a suite stays
    for item in items:
        markers = (("smoke", SMOKE), ("soak_too", CAMPAIGN), ("alone", ALONE), ("timed", TIMED))
        for marker, paths in markers:
            if any(item.path.is_relative_to(tests / path) for path in paths):
                item.add_marker(marker)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., RankPool]]:
    """rank_pool(world_size, backend="zeropg", place=...) -> RankPool, kept for the session; at most two at a time."""
    pools: dict[tuple[int, str, Place], RankPool] = {}

    def get(world_size: int, backend: str = "zeropg", place: Place = THIS_MACHINE) -> RankPool:
        key = (world_size, backend, place)
        pool = pools.pop(key, None) or RankPool(world_size, backend=backend, place=place)
        pools[key] = pool  # the most recently used comes last
        while len(pools) > 2:
            pools.pop(next(iter(pools))).close()
        return pool

    yield get
    for pool in pools.values():
        pool.close()
