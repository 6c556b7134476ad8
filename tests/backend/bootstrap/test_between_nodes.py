"""Groups whose ranks are on several nodes: what is found, and what goes wrong between them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.deadlines import new_group_with
from tests.spawn import SeparateHosts, run_ranks
from tests.wires import WIRES, missing_library

TWO_NODES = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1)}  # by world size: the host of each rank


def run_on_two_nodes(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return run_ranks(world_size, function, *args, place=SeparateHosts(hosts=TWO_NODES[world_size]), **options)


def error_of(call: Callable[[], Any]) -> str:
    try:
        result = call()
        if result is not None:
            result.wait()
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def find_nodes() -> tuple[str, list[list[int]]]:
    import zeropg

    topology = zeropg.topology()
    return str(topology), topology.nodes


def test_topology_is_a_table_of_the_nodes() -> None:
    for rank, (table, nodes) in enumerate(run_on_two_nodes(3, find_nodes)):
        assert nodes == [[0, 1], [2]]
        assert "host-0" in table and "host-1" in table and f"{rank}*" in table


def exchange(sizes: list[int]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in sizes:
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
            requests = []
            received = {}
            for peer in range(size):
                if peer != rank:
                    received[peer] = torch.empty(numel, dtype=dtype)
                    requests.append(dist.irecv(received[peer], peer, tag=7))
                    requests.append(dist.isend(torch.full((numel,), rank + 2 * peer, dtype=dtype), peer, tag=7))
            for request in requests:
                request.wait()
            for peer, tensor in received.items():
                assert torch.equal(tensor, torch.full((numel,), peer + 2 * rank, dtype=dtype))
        flat = torch.arange(size * numel) + rank * 1_000_000
        out = torch.empty_like(flat)
        dist.all_to_all_single(out, flat)
        for peer in range(size):
            part = torch.arange(rank * numel, (rank + 1) * numel) + peer * 1_000_000
            assert torch.equal(out[peer * numel : (peer + 1) * numel], part)


SIZES = [0, 1, 3, 1001, 700_000]  # the last one is more than a window


@pytest.mark.parametrize("world_size", TWO_NODES)
def test_messages_and_all_to_all_of_any_size(world_size: int) -> None:
    run_on_two_nodes(world_size, exchange, SIZES)


def exchange_over(network: str) -> None:
    from zeropg.backend import BackendOptions

    for _ in range(2):  # the second group after the first one's end
        dist.init_process_group("zeropg", pg_options=BackendOptions(network=network), **store_of_this_test())
        exchange(SIZES)
        total = torch.ones(100_003)
        dist.all_reduce(total)
        assert total.eq(dist.get_world_size()).all()
        dist.destroy_process_group()


def store_of_this_test() -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store_of_this_test.calls = getattr(store_of_this_test, "calls", 0) + 1  # type: ignore[attr-defined]
    path = f"{os.environ['STORE_PATH']}{store_of_this_test.calls}"  # type: ignore[attr-defined]
    return {"store": dist.FileStore(path, size), "rank": rank, "world_size": size}


@pytest.mark.parametrize("network", WIRES)
def test_the_same_over_every_wire(tmp_path: Path, network: str) -> None:
    if reason := missing_library(network):
        pytest.skip(reason)
    env = {"STORE_PATH": str(tmp_path / "store")}
    run_on_two_nodes(3, exchange_over, network, backend=None, env=env)


def meet_at(ports: str) -> str:
    from zeropg.backend import BackendOptions

    try:
        dist.init_process_group("zeropg", pg_options=BackendOptions(ports=ports), **store_of_this_test())
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == dist.get_world_size()
    except dist.DistBackendError as error:
        return str(error)
    return "met"


def test_ports_are_a_range_and_one_that_is_too_small_is_named_on_every_rank(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        last = probe.getsockname()[1]
    for ports, expected in ((f"{last - 1}-{last}", "ZEROPG_PORTS"), (f"{last - 40}-{last}", "met")):
        env = {"STORE_PATH": str(tmp_path / ports)}
        for told in run_on_two_nodes(3, meet_at, ports, backend=None, env=env):
            assert expected in told


def test_rules_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in (("ZEROPG_PORTS", "9-1"), ("ZEROPG_INTERFACE", "10.0.0.0/33")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            with pytest.raises(ValueError, match=text):
                dist.init_process_group("zeropg", store=dist.HashStore(), rank=0, world_size=1)


def test_a_network_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    from zeropg.backend import BackendOptions

    with pytest.raises(ValueError, match=f"network is 'pigeons', expected automatic.*{WIRES[-1]}"):
        BackendOptions(network="pigeons")
    options = BackendOptions()
    assert options.network == "automatic"
    for network in WIRES:
        options.network = network
        assert options.network == network
    with pytest.raises(ValueError, match="network is ''"):
        options.network = ""


def call_all_reduce() -> None:
    dist.all_reduce(torch.ones(100_000))


def call_receive() -> None:
    dist.recv(torch.ones(10), 2)


def wait_for_two(signal_number: int) -> tuple[str, float]:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal_number)
    start = time.monotonic()
    call = call_receive if dist.get_rank() == 0 else call_all_reduce
    return error_of(call), time.monotonic() - start


def test_a_killed_rank_of_another_node_is_named_at_once() -> None:
    answers = run_on_two_nodes(4, wait_for_two, signal.SIGKILL, expect_death=[2])
    for rank in (0, 1, 3):
        error, seconds = answers[rank]
        assert "rank 2" in error and seconds < 20, error


def stop_two() -> str:
    dist.all_reduce(torch.ones(1))
    group = new_group_with(4)
    if dist.get_rank() == 2:
        child = os.fork()
        if child == 0:
            time.sleep(9)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    return error_of(lambda: dist.all_reduce(torch.ones(100_000), group=group))


def test_a_silent_rank_of_another_node_is_named_when_the_deadline_passes() -> None:
    errors = run_on_two_nodes(3, stop_two)
    for error in errors[:2]:
        assert "rank 2" in error, error
    assert any("no sign of life from rank 2" in error for error in errors[:2]), errors


def expect_what_nobody_sends(rank: int) -> None:
    expected = [100 if (source, rank) == (0, 2) else 0 for source in range(4)]
    dist.all_to_all_single(torch.empty(sum(expected)), torch.empty(0), expected, [0] * 4)


MISMATCHES: dict[str, Callable[[int], Any]] = {
    "sizes": lambda rank: dist.all_reduce(torch.ones(10 + rank // 2)),
    "operations": lambda rank: dist.all_reduce(torch.ones(8)) if rank < 2 else dist.broadcast(torch.ones(8), 0),
    "splits": expect_what_nobody_sends,
    "dtypes": lambda rank: dist.all_reduce(torch.ones(8, dtype=torch.float32 if rank < 2 else torch.int32)),
}


def call_differently(name: str) -> str:
    def call() -> None:
        MISMATCHES[name](dist.get_rank())
        dist.barrier()  # where the first one may end before the other node's call is seen

    return error_of(call)


@pytest.mark.parametrize("name", MISMATCHES)
def test_different_calls_on_two_nodes_are_an_error_on_every_rank(name: str) -> None:
    for error in run_on_two_nodes(4, call_differently, name):
        assert "different calls" in error or "rank 0 sends 0 bytes to this rank, which expects 400" in error, error
