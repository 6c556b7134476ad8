"""Runs every GoogleTest binary of the build, one pytest item each, so that `pytest tests` is everything."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = Path(os.environ.get("ZEROPG_BUILD_DIR", ROOT / "build" / f"torch-{version('torch').split('+')[0]}")).resolve()
SOURCES = sorted(path.relative_to(ROOT / "tests").with_suffix("") for path in (ROOT / "tests").rglob("*_test.cpp"))
BINARIES = [path for path in SOURCES if (BUILD / "tests" / path).is_file()]
# Most of their cases wait for a deadline, so they wait together: each binary runs in several processes at once.
WAITING = {
    "backend/bootstrap/bootstrap_test",
    "backend/bootstrap/sockets/tcp_connector_test",
    "backend/bootstrap/sockets/tcp_mesh_test",
}
SHARDS_OF_WAITING = 4
TIMEOUT_SECONDS = int(os.environ.get("ZEROPG_TEST_SECONDS", "300"))  # for one binary; sanitizers need more


def test_every_source_has_its_binary_where_any_has() -> None:
    missing = [str(path) for path in SOURCES if path not in BINARIES]
    assert not BINARIES or not missing, f"not in {BUILD}: {missing}; build all of it"


@pytest.mark.parametrize("binary", BINARIES or [None], ids=str)
def test_cpp(binary: Path | None) -> None:
    if binary is None:
        pytest.skip(f"no C++ tests in {BUILD}: they need GoogleTest (Debian: libgtest-dev) when `make build` runs")
    shards = SHARDS_OF_WAITING if str(binary) in WAITING else 1

    def run(shard: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BUILD / "tests" / binary, "--gtest_brief=1"],
            env=os.environ | {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            cwd=ROOT,
        )

    with ThreadPoolExecutor(shards) as threads:
        for result in threads.map(run, range(shards)):
            assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"


def test_the_suites_of_transports_run_on_every_wire_that_can_be_used_here() -> None:
    """Without its library a wire's suites have no instance, which nobody would miss."""
    from tests.wires import USABLE_WIRES

    if not BINARIES:
        pytest.skip(f"no C++ tests in {BUILD}")
    for name in USABLE_WIRES:
        command = [BUILD / "tests" / "backend" / "transport" / "network" / f"{name}_wire_test", "--gtest_list_tests"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout
        for suite in ("TransportSuite", "NetworkSuite"):
            assert f"{name.capitalize()}/{suite}" in listed, listed
