"""Hosts that vanish and strangers who knock, while ranks of two hosts work."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.backend.deadlines import give_seconds
from tests.lab.place import HostsPlace
from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import RankPool
from tests.wires import WIRES, missing_library
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]

JOIN_TIMEOUT = 60.0  # for what is no test: 4 ranks begin on few CPUs
GROUP_TIMEOUT = 8.0  # once they train
AT_ONCE = 40.0
MARGIN = 15.0  # for a busy machine, and for the bookkeeping after the deadline


class Failure(NamedTuple):
    message: str
    time: float  # of the machine's clock


def join(timeout: float = JOIN_TIMEOUT, network: str = "automatic") -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=60))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout)
    options = zeropg.BackendOptions(network=network)
    dist.init_process_group("zeropg", store=store, rank=rank, world_size=world_size, timeout=limit, pg_options=options)


def train_until_it_fails(
    folder: str, stage: int, timeout: float = GROUP_TIMEOUT, network: str = "automatic"
) -> Failure:
    """Touches a file once training runs with this timeout, and returns what the training loop raised."""
    torch.set_num_threads(1)
    join(network=network)
    model = zeropg.fully_shard(make_model(), stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    batch = make_batches(1)[0].chunk(4)[dist.get_rank()]
    try:
        for step in range(1_000_000):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                for group in dist.distributed_c10d._world.pg_map:  # a sharded model has one of its own
                    give_seconds(group, timeout)
            if step == 3:  # nothing that began before is still open
                Path(folder, f"rank{dist.get_rank()}").touch()
    except Exception as error:
        return Failure(str(error), time.time())
    raise AssertionError("training went on without its peers")


@contextmanager
def when_all_train(folder: Path, act: Callable[[], None]) -> Iterator[list[float]]:
    """Acts as soon as 4 ranks train; the list then holds the time at which it did."""
    done: list[float] = []

    def wait() -> None:
        deadline = time.monotonic() + 90
        while len(list(folder.glob("rank*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        done.append(time.time())
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield done
    thread.join()


@pytest.fixture(params=WIRES)
def network(request: pytest.FixtureRequest) -> str:
    if reason := missing_library(request.param):
        pytest.skip(reason)
    return str(request.param)


def check(failures: list[Failure], others: tuple[str, ...], vanished: float, within: float) -> None:
    for failure in failures:
        assert "[zeropg rank" in failure.message
        assert any(rank in failure.message for rank in others), failure.message
        assert failure.time - vanished < within, failure


def test_a_host_whose_cable_is_pulled(tmp_path: Path, network: str) -> None:
    with Lab(hosts=2) as lab, RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
        with when_all_train(tmp_path, lambda: lab.cut(1)) as cut:
            failures = pool.run(train_until_it_fails, str(tmp_path), 3, GROUP_TIMEOUT, network, timeout=150)
        check(failures[:2], ("rank 2", "rank 3", "ranks 2"), cut[0], GROUP_TIMEOUT + MARGIN)
        check(failures[2:], ("rank 0", "rank 1", "ranks 0"), cut[0], GROUP_TIMEOUT + MARGIN)


def join_when_told(folder: str, timeout: float) -> Failure:
    """Rank 0 never comes; the others wait for it in the store."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    Path(folder, f"rank{rank}").touch()
    if rank == 0:
        time.sleep(timeout)
        del store
        return Failure("", time.time())
    try:
        join(timeout)
    except Exception as error:
        return Failure(str(error), time.time())
    raise AssertionError("the ranks joined without rank 0")


def test_a_store_that_is_cut_off_is_missed_at_the_deadline(tmp_path: Path) -> None:
    def cut_a_little_later() -> None:
        time.sleep(1)  # they ask the store over and over by now
        lab.cut(1)

    with Lab(hosts=2) as lab, RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
        with when_all_train(tmp_path, cut_a_little_later) as begin:
            failures = pool.run(join_when_told, str(tmp_path), 8.0, timeout=150)
        assert "rank 0 did not come to the store in time" in failures[1].message
        for failure in failures[2:]:
            assert "[zeropg rank" in failure.message and "the store at 10.77.0." in failure.message, failure.message
            assert "has not answered for" in failure.message and "look at the network" in failure.message
        assert all(failure.time - begin[0] < 8 + MARGIN for failure in failures)


def wait_for_a_host_that_is_gone(folder: str) -> Failure:
    join(150)
    dist.all_reduce(torch.ones(1))
    Path(folder, f"rank{dist.get_rank()}").touch()
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except Exception as error:
        return Failure(str(error), time.time())


def test_a_cable_is_missed_long_before_a_distant_deadline(tmp_path: Path) -> None:
    with Lab(hosts=2) as lab, RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
        with when_all_train(tmp_path, lambda: lab.cut(1)) as cut:
            failures = pool.run(wait_for_a_host_that_is_gone, str(tmp_path), timeout=150)
        check(failures[:2], ("rank 2", "rank 3", "ranks 2"), cut[0], 80)
        # The kernel says it where nothing was on its way at the cut: its keep-alive has the same 30 s.
        ways = ("acknowledged nothing for 30 s", "Connection timed out")
        assert any(way in failure.message for way in ways for failure in failures), failures


def test_a_host_that_dies(tmp_path: Path, network: str) -> None:
    with Lab(hosts=2) as lab, RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
        with when_all_train(tmp_path, lambda: lab.kill(1)) as death:
            arguments = (str(tmp_path), 1, GROUP_TIMEOUT, network)
            failures = pool.run(train_until_it_fails, *arguments, timeout=150, expect_death=[2, 3])
        check(failures[:2], ("rank 2", "rank 3", "ranks 2"), death[0], GROUP_TIMEOUT + MARGIN)


def die_after_a_while(folder: str, victim: int, network: str) -> Failure | None:
    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=kill_when_all_train, args=(folder,), daemon=True).start()
    return train_until_it_fails(folder, 2, JOIN_TIMEOUT, network)


def kill_when_all_train(folder: str) -> None:
    while len(list(Path(folder).glob("rank*"))) < 4:
        time.sleep(0.02)
    Path(folder, "death").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_noticed_at_once_on_every_host(tmp_path: Path, network: str) -> None:
    with Lab(hosts=2) as lab, RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
        failures = pool.run(die_after_a_while, str(tmp_path), 3, network, timeout=150, expect_death=[3])
        death = float((tmp_path / "death").read_text())
        check(failures[:3], ("rank 3",), death, AT_ONCE)


STRANGER = """
import os, socket, struct, sys, time
address, port, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
texts = {
    "silent": b"",
    "garbage": os.urandom(4096),
    "huge": struct.pack("<QQQQ", 2**62, 2**62, 2**62, 2**62) + b"x" * 64,
    "ones": b"\\xff" * 4096,
    "http": b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n",
    "gone": None,
}
connection = socket.create_connection((address, port), timeout=5)
print("in", flush=True)
text = texts[kind]
if text is not None:
    try:
        connection.sendall(text)
        time.sleep(float(sys.argv[4]))
    except OSError:
        pass
connection.close()
"""
KINDS = ("silent", "garbage", "huge", "ones", "http", "gone")


def reduce_until_told(folder: str, network: str) -> int:
    """Counts correct all-reduces until the file `stop` is there."""
    join(network=network)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = (7, 100_003)
    count = 0
    while True:
        for numel in sizes:
            tensor = torch.full((numel,), float(rank + count))
            dist.all_reduce(tensor)
            assert tensor.unique().tolist() == [world_size * count + 6.0]
        count += 1
        Path(folder, f"rank{rank}").touch()
        stop = torch.tensor([int(Path(folder, "stop").exists())])
        dist.broadcast(stop, src=0)
        if stop.item():
            return count


def test_strangers_harm_nobody(tmp_path: Path, network: str) -> None:
    """They knock at every port that the ranks open, before and while the ranks of the other host do.

    UCX has one for each rank, for as long as the group lives. None of these strangers speaks UCX's own language: see
    backend/transport/README.md.
    """
    doors = 4 if network == "ucx" else 2
    stop = threading.Event()
    strangers: dict[tuple[str, int], list[subprocess.Popen[str]]] = {}  # by the door at which they knock

    inside: set[tuple[str, int]] = set()

    def look_who_is_in() -> None:
        for door in strangers.keys() - inside:
            for stranger in strangers[door]:
                assert stranger.stdout is not None
                if select.select([stranger.stdout], [], [], 0)[0] and stranger.stdout.readline() == "in\n":
                    inside.add(door)

    def knock(lab: Lab) -> None:
        last = time.monotonic()
        while not stop.wait(0.01):
            for address, port in {door for host in (0, 1) for door in lab.listening(host)} - strangers.keys():
                command = (sys.executable, "-S", "-c", STRANGER, address, str(port))
                strangers[address, port] = [lab.run(2, [*command, kind, "5"]) for kind in KINDS]
                last = time.monotonic()
            look_who_is_in()
            if len(strangers) >= doors and inside == strangers.keys() and time.monotonic() - last > 2:
                lab.unite(0, 1)  # while silent strangers still wait in front of the ranks
            gone = all(stranger.poll() is not None for knocking in strangers.values() for stranger in knocking)
            if gone and len(list(tmp_path.glob("rank*"))) == 4:
                (tmp_path / "stop").touch()

    with Lab(hosts=3) as lab, RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
        lab.separate(0, 1)  # so that the ranks go on listening
        thread = threading.Thread(target=knock, args=(lab,))
        thread.start()
        try:
            counts = pool.run(reduce_until_told, str(tmp_path), network, timeout=150)
        finally:
            stop.set()
            thread.join()
        assert len(set(counts)) == 1 and counts[0] > 1
        assert len(strangers) >= doors, f"only {[*strangers]} listened while the hosts could not reach each other"
        for knocking in strangers.values():
            for stranger in knocking:
                stranger.communicate(timeout=30)
