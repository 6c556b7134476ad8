"""The lab keeps its promises: proven with gloo, so that what zeropg does there can be believed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lab.place import HostsPlace
from tests.spawn import RankPool
from zeropg.tools.bench.nodes import standstills
from zeropg.tools.lab.lab import BURST, Lab
from zeropg.tools.lab.stream import stream_rates

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]
MEGABYTES_4 = 4 << 20


def reduce_and_tell(numel: int) -> tuple[str, float, float]:
    tensor = torch.full((numel,), float(dist.get_rank()))
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    return socket.gethostname(), tensor.unique().item(), time.perf_counter() - start


def test_ranks_of_two_hosts_reduce_at_the_rate_of_their_links(lab: Lab, lab_pool: Callable[[str], RankPool]) -> None:
    pool = lab_pool("gloo")
    pool.run(reduce_and_tell, 1)
    before = [lab.interface_bytes(host) for host in (0, 1)]
    results = pool.run(reduce_and_tell, MEGABYTES_4)  # 16 MiB in fp32
    after = [lab.interface_bytes(host) for host in (0, 1)]

    assert [host for host, _, _ in results] == ["host0", "host0", "host1", "host1"]
    assert {value for _, value, _ in results} == {6.0}
    # A ring of 4 ranks crosses the cable once in each direction, with 2 (n - 1) / n of the data.
    expected = 4 * MEGABYTES_4 * 2 * 3 / 4
    for host in (0, 1):
        sent, received = (getattr(after[host], way) - getattr(before[host], way) for way in ("tx", "rx"))
        assert expected <= sent <= 1.2 * expected
        assert expected <= received <= 1.2 * expected
    assert max(seconds for _, _, seconds in results) > 0.9 * (expected - BURST) / 125e6


SCRIPT = """
import os, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.tensor([float(dist.get_rank())])
dist.all_reduce(tensor)
line = f"{socket.gethostname()} {dist.get_rank()} {os.environ['LOCAL_RANK']} {tensor.item()}\\n"
sys.stdout.write(line)  # at once: ranks of a host share the pipe
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("rendezvous", "nproc_per_node"), [("static", [2, 1]), ("c10d", [1, 1])])
def test_torchrun_meets_on_the_first_host(lab: Lab, tmp_path: Path, rendezvous: str, nproc_per_node: list[int]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    hosts = lab.torchrun(str(script), nproc_per_node=nproc_per_node, rendezvous=rendezvous).wait(timeout=90)
    assert [host.returncode for host in hosts] == [0, 0], hosts
    said = [sorted(host.stdout.splitlines()) for host in hosts]
    total = float(sum(range(sum(nproc_per_node))))
    assert {line.split()[0] for lines in said for line in lines} == {"host0", "host1"}
    for lines, count in zip(said, nproc_per_node, strict=True):
        assert [line.split()[2:] for line in lines] == [[str(local), str(total)] for local in range(count)]


PLACE = 'import os, socket; print(socket.gethostname(), *(os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))'


def test_ranks_are_on_the_hosts_that_are_named(lab: Lab) -> None:
    ranks = lab.ranks(sys.executable, "-S", "-c", PLACE, hosts=[0, 1, 0]).wait(timeout=20)
    assert [rank.stdout for rank in ranks] == ["host0 0 0 3\n", "host1 1 0 3\n", "host0 2 1 3\n"]


def test_a_rank_may_be_stopped_for_a_while(lab: Lab) -> None:
    stand = f"import runpy, time\nwith runpy.run_path({standstills.__file__!r})['standstills'](): time.sleep(1.5)"
    (rank,) = lab.ranks(sys.executable, "-S", "-c", stand, hosts=[1]).wait(timeout=20)
    assert rank.returncode == 0, rank.stderr


def megabits(lab: Lab, *pairs: tuple[int, int]) -> list[float]:
    """What streams bring, which all run at once; in a packet of 1514 bytes 1448 are payload."""
    return [8e-6 * rate * 1514 / 1448 for rate in stream_rates(lab, pairs, seconds=2.0, settle=0.5)]


def test_links_and_uplinks_carry_what_they_are_told_to(needs_lab: None) -> None:
    def about(*rates: float) -> object:
        return pytest.approx(list(rates), rel=0.1)

    with Lab(hosts=4, rate=["80mbit", "80mbit", "40mbit", None], racks=2, uplink="60mbit") as lab:
        assert [lab.environment(host)["ZEROPG_RACK_ID"] for host in range(4)] == ["rack0", "rack0", "rack1", "rack1"]
        assert megabits(lab, (0, 1), (1, 0), (3, 2)) == about(80, 80, 40)  # inside the racks, where no uplink limits
        assert sum(megabits(lab, (0, 2), (1, 3))) == pytest.approx(60, rel=0.1)
        lab.set_rate(1, "20mbit")
        lab.set_rate(2, None)
        in_rack_0, in_rack_1, across = megabits(lab, (0, 1), (3, 2), (3, 0))
        assert [in_rack_0, across] == about(20, 60)
        assert in_rack_1 > 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": 3, "rate": ["1mbit"] * 2}, "2 rates for 3 hosts"),
        ({"hosts": 3, "racks": 2}, "3 hosts cannot stand in 2 racks"),
        ({"hosts": 2, "uplink": "1mbit"}, "there is only one"),
    ],
)
def test_a_lab_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lab(**arguments)


def test_hosts_share_nothing_but_files_and_the_switch(lab: Lab) -> None:
    theirs = lab.run(0, ["sleep", "60"])
    tell = "hostname; ls /sys/class/net; ls /dev/shm | wc -l; ps ax -o comm="
    out, err = lab.run(1, ["sh", "-c", tell]).communicate(timeout=20)
    assert out.split()[:4] == ["host1", "eth0", "lo", "0"], err
    assert "cat" in out and "sleep" not in out
    theirs.kill()
    theirs.wait()


def test_a_cut_host_is_silent_until_it_heals(needs_lab: None) -> None:
    server = (
        "import socket, time; s = socket.create_server(('10.77.0.2', 7000)); print('up', flush=True); time.sleep(60)"
    )
    client = "import socket, sys; socket.create_connection(('10.77.0.2', 7000), timeout=float(sys.argv[1])).close()"
    with Lab(hosts=2) as lab:
        listening = lab.run(1, [sys.executable, "-c", server])
        assert listening.stdout is not None and listening.stdout.readline() == "up\n"
        assert lab.listening(1) == [("10.77.0.2", 7000)]
        reachable = []
        for change, patience in ((lab.cut, "1"), (lab.heal, "10")):
            change(1)
            reachable.append(lab.run(0, [sys.executable, "-c", client, patience]).wait(timeout=20) == 0)
        assert reachable == [False, True]


def test_separated_hosts_reach_others_only(needs_lab: None) -> None:
    server = "import socket, time; s = socket.create_server(('', 7000)); print('up', flush=True); time.sleep(60)"
    client = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])).close()"

    def reaches(lab: Lab, a: int, b: int) -> bool:
        patience = "1" if is_separate and {a, b} == {0, 1} else "10"
        return lab.run(a, [sys.executable, "-S", "-c", client, lab.hosts[b].address, patience]).wait(timeout=20) == 0

    with Lab(hosts=3) as lab:
        for host in (0, 1):
            listening = lab.run(host, [sys.executable, "-S", "-c", server])
            assert listening.stdout is not None and listening.stdout.readline() == "up\n"
        is_separate = True
        lab.separate(0, 1)
        assert [reaches(lab, 0, 1), reaches(lab, 1, 0), reaches(lab, 2, 0), reaches(lab, 2, 1)] == [
            False,
            False,
            True,
            True,
        ]
        is_separate = False
        lab.unite(0, 1)
        assert reaches(lab, 0, 1)


def test_killing_a_host_kills_its_ranks_only(needs_lab: None) -> None:
    with Lab(hosts=2) as lab, RankPool(2, backend=None, place=HostsPlace(lab, per_host=1)) as pool:
        assert pool.run(socket.gethostname) == ["host0", "host1"]
        lab.kill(1)
        assert pool.run(socket.gethostname, expect_death=[1]) == ["host0", None]


def test_nothing_is_left_when_the_test_is_killed(needs_lab: None, tmp_path: Path) -> None:
    program = """
import sys, time
from zeropg.tools.lab.lab import Lab
with Lab(hosts=2) as lab:
    lab.run(0, ["sleep", "3600.125"])
    print("up", flush=True)
    time.sleep(60)
"""
    root = str(Path(__file__).parents[2])
    test = subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None and test.stdout.readline() == "up\n"
    deadline = time.monotonic() + 20
    while not processes_with("3600.125") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_with("3600.125")
    os.kill(test.pid, signal.SIGKILL)
    test.wait()
    while processes_with("3600.125") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes_with("3600.125")


def processes_with(argument: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes():
                found.append(str(path))
        except OSError:
            continue
    return found
