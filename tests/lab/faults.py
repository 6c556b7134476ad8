"""What goes wrong between hosts: one fault of a random program, whom it hits, and whom errors must name.

Faults from outside are the controller's (`strike`, `relent`); those that a rank brings about itself are `misbehave`.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.wires import USABLE_WIRES
from zeropg.tools.lab.lab import Lab

FROM_OUTSIDE = ("cut", "separate", "kill host", "kill rank", "stop rank")
BY_A_RANK = ("exit", "leave", "idle", "other call")
PASSING = ("pause", "blink", "slow link")  # nobody may notice more than a delay
DEADLY = ("kill host", "kill rank", "exit")  # whose victims give no answer


@dataclass(frozen=True)
class Plan:
    """One trial. `victim` is a rank or, for faults of hosts, a host."""

    seed: int
    hosts: int
    per_host: int
    fault: str
    victim: int
    other: int  # host that `victim` is separated from
    moment: str  # "join" or "play"
    delay: float  # seconds after that begins
    calls: int  # after which a rank misbehaves
    length: float  # seconds of what passes
    groups: int  # besides the world
    network: str
    connections: str
    authenticate_frames: bool

    @staticmethod
    def of(seed: int) -> Plan:
        choose = random.Random(seed)
        hosts = choose.choice((2, 2, 3))
        per_host = choose.choice((1, 2)) if hosts == 2 else 1
        fault = choose.choice((*FROM_OUTSIDE, *BY_A_RANK, *PASSING))
        is_of_host = fault in ("cut", "separate", "kill host", "blink", "slow link")
        network = choose.choice(("tcp", "tcp", "tcp", "ucx"))
        network = network if network in USABLE_WIRES else "tcp"
        # UCX looks at its interfaces once: one without a cable at that moment is not there.
        sees_no_cable = network == "ucx" and fault == "blink"
        return Plan(
            seed=seed,
            hosts=hosts,
            per_host=per_host,
            fault=fault,
            victim=choose.randrange(hosts if is_of_host else hosts * per_host),
            other=choose.randrange(hosts - 1),
            moment="play" if fault in BY_A_RANK or sees_no_cable else choose.choice(("join", "play", "play", "play")),
            delay=choose.random() * 0.4,
            calls=choose.randrange(60),
            length=0.2 + choose.random() * 1.3,
            groups=choose.choice((0, 0, 1)),
            network=network,
            connections=choose.choice(("all", "on_demand")) if network == "tcp" else "all",
            authenticate_frames=choose.random() < 0.3,
        )

    @property
    def world_size(self) -> int:
        return self.hosts * self.per_host

    @property
    def passes(self) -> bool:
        return self.fault in PASSING

    @property
    def dead(self) -> set[int]:
        """Ranks that give no answer."""
        if self.fault not in DEADLY:
            return set()
        return self.ranks_of(self.victim) if self.fault == "kill host" else {self.victim}

    def ranks_of(self, host: int) -> set[int]:
        return set(range(host * self.per_host, (host + 1) * self.per_host))

    def cuts_off_from_the_store(self, rank: int) -> bool:
        return self.fault == "cut" and rank in self.ranks_of(self.victim)

    @property
    def apart(self) -> int:
        """The host that `victim` is separated from."""
        return self.other if self.other < self.victim else self.other + 1

    def culprits(self, rank: int) -> set[int]:
        """Whom the error of `rank` may name: the victims; of a broken link the ranks at its other end."""
        everybody = set(range(self.world_size))
        if self.fault == "cut":
            hit = self.ranks_of(self.victim)
            return everybody - hit if rank in hit else hit
        if self.fault == "separate":
            ends = (self.ranks_of(self.victim), self.ranks_of(self.apart))
            beyond = [far for near, far in (ends, ends[::-1]) if rank in near]
            return beyond[0] if beyond else ends[0] | ends[1]
        if self.fault == "kill host":
            return self.ranks_of(self.victim)
        return {self.victim}


def strike(plan: Plan, lab: Lab, pid_of: Callable[[int], int]) -> None:
    """What the controller does at the moment; `pid_of` gives a rank's process."""
    match plan.fault:
        case "cut" | "blink":
            lab.cut(plan.victim)
        case "separate":
            lab.separate(plan.victim, plan.apart)
        case "kill host":
            lab.kill(plan.victim)
        case "slow link":
            lab.set_rate(plan.victim, "2mbit")
        case "kill rank":
            os.kill(pid_of(plan.victim), signal.SIGKILL)
        case "stop rank" | "pause":
            os.kill(pid_of(plan.victim), signal.SIGSTOP)


def relent(plan: Plan, lab: Lab, pid_of: Callable[[int], int]) -> None:
    """Undoes what `strike` did, where it can be."""
    match plan.fault:
        case "cut" | "blink":
            lab.heal(plan.victim)
        case "separate":
            lab.unite(plan.victim, plan.apart)
        case "slow link":
            lab.set_rate(plan.victim, "1gbit")
        case "stop rank" | "pause":
            os.kill(pid_of(plan.victim), signal.SIGCONT)


def misbehave(fault: str) -> None:
    """What the victim does at its moment, before it plays no more. Where it is idle, it is there and calls nothing."""
    match fault:
        case "exit":
            os._exit(3)
        case "leave":
            dist.destroy_process_group()
        case "other call":
            dist.all_reduce(torch.ones(12_345_678 % 1009))
