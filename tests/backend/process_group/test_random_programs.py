"""Random programs: every rank runs the same calls, each with tensors, waits and pauses of its own.

ZEROPG_PROGRAM_SEED=N runs program N alone, as a failure's message says; ZEROPG_PROGRAM_SECONDS=N goes on for so long
with programs that nobody has run.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.backend.random_calls import Program
from tests.spawn import THIS_MACHINE, RankPool, SeparateDomains, SeparateHosts

CALLS = 60  # of a program


def run_program(seed: int) -> None:
    program = Program(seed, groups=2, largest_block_bits=20)
    program.play(CALLS)
    program.finish()
    program.close()


PLACES = {
    "2 ranks": (2, THIS_MACHINE),
    "3 ranks": (3, THIS_MACHINE),
    "5 ranks": (5, THIS_MACHINE),
    "2 hosts": (4, SeparateHosts(hosts=(0, 0, 1, 1))),
    "3 uneven hosts": (5, SeparateHosts(hosts=(0, 1, 0, 2, 1))),
    "2 racks": (7, SeparateHosts(hosts=(0, 1, 2, 0, 3, 1, 4))),
    "4 domains": (4, SeparateDomains(domains=(0, 0, 1, 1))),
}
RACKS = [
    {"name": name, "hosts": [f"host-{host}" for host in hosts], "node_gbps": 1.0, "uplink_gbps": 0.1}
    for name, hosts in (("a", (0, 2, 4)), ("b", (1, 3)))
]


@pytest.mark.parametrize("where", PLACES)
def test_random_programs_give_what_their_formulas_say(where: str, tmp_path: Path) -> None:
    world_size, place = PLACES[where]
    env = {}
    if "racks" in where:  # whose uplinks are said to be slow, so that algorithms over racks are chosen
        env["ZEROPG_TOPOLOGY_FILE"] = str(tmp_path / "racks.json")
        Path(env["ZEROPG_TOPOLOGY_FILE"]).write_text(json.dumps({"racks": RACKS}))
    seconds = float(os.environ.get("ZEROPG_PROGRAM_SECONDS", 0))
    seeds = [int(os.environ["ZEROPG_PROGRAM_SEED"])] if "ZEROPG_PROGRAM_SEED" in os.environ else [1, 2, 3]
    end = time.monotonic() + seconds
    with RankPool(world_size, place=place, env=env) as ranks:
        for seed in seeds:
            run_one(ranks, seed)
        while time.monotonic() < end:
            run_one(ranks, random.randrange(1 << 30))


def run_one(ranks: RankPool, seed: int) -> None:
    try:
        ranks.run(run_program, seed, timeout=60)
    except AssertionError as error:
        raise AssertionError(f"program {seed} (ZEROPG_PROGRAM_SEED={seed}): {error}") from error
