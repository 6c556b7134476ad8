"""Random calls: the same on all ranks of a group, with tensors, waits and pauses of each rank's own.

What a call must give follows from a formula, so one wrong element shows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import zeropg
from tests.backend.reference import assert_same, folded

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
MOST_IN_FLIGHT = 6


@dataclass
class Call:
    """One call of the program, the same on all ranks of `ranks`; `own` decides what is a rank's own affair."""

    number: int
    group: Any
    ranks: list[int]
    count: int  # elements of a block
    dtype: torch.dtype
    shared: random.Random
    own: random.Random
    checks: list[Callable[[], None]] = field(default_factory=list)  # of what the call has written

    @property
    def place(self) -> int:
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.ranks)

    def input(self, place: int, block: int, count: int) -> torch.Tensor:
        """Block `block` of what the rank at `place` contributes: numbers whose sums are exact in every dtype."""
        salt = self.number * 131 + place * 17 + block
        return ((torch.arange(count) * 7 + salt * 5) % 11 % 4).to(self.dtype)

    def empty(self, count: int) -> torch.Tensor:
        kind = self.own.choice(("heap", "pool", "view"))
        if kind == "pool":
            tensor: torch.Tensor = zeropg.empty(count, dtype=self.dtype, group=self.group)
            return tensor
        if kind == "view":
            return torch.empty(count + 3, dtype=self.dtype)[3:]
        return torch.empty(count, dtype=self.dtype)

    def filled(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self.empty(sum(part.numel() for part in parts)).copy_(torch.cat(parts))

    def expect(self, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
        expected, what = torch.cat(parts), f"call {self.number} on ranks {self.ranks}"
        self.checks.append(lambda: assert_same(tensor, expected, what))

    def check(self) -> None:
        for check in self.checks:
            check()


def all_reduce(call: Call, is_async: bool) -> Any:
    op = call.shared.choice((dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN))
    tensor = call.filled([call.input(call.place, 0, call.count)])
    call.expect(tensor, [reduced(call, op, 0)])
    return dist.all_reduce(tensor, op, group=call.group, async_op=is_async)


def reduced(call: Call, op: Any, block: int) -> torch.Tensor:
    return folded([call.input(place, block, call.count) for place in range(call.size)], op)


def reduce(call: Call, is_async: bool) -> Any:
    root = call.shared.choice(call.ranks)
    tensor = call.filled([call.input(call.place, 0, call.count)])
    if dist.get_rank() == root:
        call.expect(tensor, [reduced(call, dist.ReduceOp.SUM, 0)])
    return dist.reduce(tensor, root, group=call.group, async_op=is_async)


def broadcast(call: Call, is_async: bool) -> Any:
    root = call.shared.choice(call.ranks)
    tensor = call.filled([call.input(call.place, 0, call.count)])
    call.expect(tensor, [call.input(call.ranks.index(root), 0, call.count)])
    return dist.broadcast(tensor, root, group=call.group, async_op=is_async)


def all_gather(call: Call, is_async: bool) -> Any:
    tensor, result = call.filled([call.input(call.place, 0, call.count)]), call.empty(call.count * call.size)
    call.expect(result, [call.input(place, 0, call.count) for place in range(call.size)])
    return dist.all_gather_into_tensor(result, tensor, group=call.group, async_op=is_async)


def all_gather_list(call: Call, is_async: bool) -> Any:
    tensor = call.filled([call.input(call.place, 0, call.count)])
    results = [call.empty(call.count) for _ in range(call.size)]
    for place, result in enumerate(results):
        call.expect(result, [call.input(place, 0, call.count)])
    return dist.all_gather(results, tensor, group=call.group, async_op=is_async)


def reduce_scatter(call: Call, is_async: bool) -> Any:
    tensor = call.filled([call.input(call.place, block, call.count) for block in range(call.size)])
    result = call.empty(call.count)
    call.expect(result, [reduced(call, dist.ReduceOp.SUM, call.place)])
    return dist.reduce_scatter_tensor(result, tensor, group=call.group, async_op=is_async)


def all_to_all(call: Call, is_async: bool) -> Any:
    counts = [[call.shared.randrange(call.count + 1) for _ in call.ranks] for _ in call.ranks]  # [from][to]
    sent, received = counts[call.place], [row[call.place] for row in counts]
    tensor = call.filled([call.input(call.place, block, count) for block, count in enumerate(sent)])
    result = call.empty(sum(received))
    call.expect(result, [call.input(place, call.place, count) for place, count in enumerate(received)])
    return dist.all_to_all_single(result, tensor, received, sent, group=call.group, async_op=is_async)


def gather(call: Call, is_async: bool) -> Any:
    root = call.shared.choice(call.ranks)
    tensor, results = call.filled([call.input(call.place, 0, call.count)]), None
    if dist.get_rank() == root:
        results = [call.empty(call.count) for _ in call.ranks]
        for place, result in enumerate(results):
            call.expect(result, [call.input(place, 0, call.count)])
    return dist.gather(tensor, results, root, group=call.group, async_op=is_async)


def scatter(call: Call, is_async: bool) -> Any:
    root = call.shared.choice(call.ranks)
    tensors = None
    if dist.get_rank() == root:
        tensors = [call.filled([call.input(call.place, block, call.count)]) for block in range(call.size)]
    result = call.empty(call.count)
    call.expect(result, [call.input(call.ranks.index(root), call.place, call.count)])
    return dist.scatter(result, tensors, root, group=call.group, async_op=is_async)


class All:
    """The works of several messages, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def shift(call: Call, is_async: bool) -> Any:
    """Everybody sends to its right neighbour, under a tag, before or after it posts its receive."""
    if call.size == 1:
        return None
    left, right = call.ranks[call.place - 1], call.ranks[(call.place + 1) % call.size]
    tensor, result = call.filled([call.input(call.place, 0, call.count)]), call.empty(call.count)
    call.expect(result, [call.input((call.place - 1) % call.size, 0, call.count)])
    halves = [(dist.irecv, result, left), (dist.isend, tensor, right)]
    call.own.shuffle(halves)
    works = All([start(half, peer, group=call.group, tag=call.number) for start, half, peer in halves])
    if is_async:
        return works
    works.wait()
    return None


def barrier(call: Call, is_async: bool) -> Any:
    return dist.barrier(group=call.group, async_op=is_async)


OPERATIONS = (
    all_reduce,
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_list,
    reduce_scatter,
    all_to_all,
    gather,
    scatter,
    shift,
    shift,
    barrier,
)


class Program:
    """What the ranks of a world call: the same calls for one seed, on the world and on `groups` random groups.

    largest_block_bits: a rank's block has up to so many elements, as their logarithm; small ones come as often as large
    ones. join_timeout: of the groups that it makes; default: torch's. Every rank makes the program, and plays as many
    calls.
    """

    def __init__(
        self, seed: int, *, groups: int, largest_block_bits: int, join_timeout: timedelta | None = None
    ) -> None:
        world_size = dist.get_world_size()
        self._shared, self._own = random.Random(seed), random.Random(seed * 1000 + dist.get_rank())
        self._largest_block_bits = largest_block_bits
        self._groups: list[tuple[Any, list[int]]] = [(dist.group.WORLD, list(range(world_size)))]
        for _ in range(groups):
            ranks = sorted(self._shared.sample(range(world_size), self._shared.randint(1, world_size)))
            self._groups.append((dist.new_group(ranks, timeout=join_timeout), ranks))
        self._in_flight: list[tuple[Any, Call]] = []
        self._number = 0

    def play(self, calls: int) -> None:
        """Makes so many more calls, and leaves some of them in flight."""
        for _ in range(calls):
            self._play_one()

    def finish(self) -> None:
        """Waits for what is in flight."""
        while self._in_flight:
            self._check_one()

    def close(self) -> None:
        """Destroys the groups that the program has made."""
        for group, ranks in self._groups[1:]:
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)

    def _play_one(self) -> None:
        shared, own = self._shared, self._own
        group, ranks = shared.choice(self._groups)
        operation = shared.choice(OPERATIONS)
        count = int(2 ** (shared.random() * self._largest_block_bits)) - 1
        dtype = shared.choice(DTYPES)
        call_seed = shared.randrange(1 << 30)
        self._number += 1
        if dist.get_rank() not in ranks:
            return
        call = Call(self._number - 1, group, ranks, count, dtype, random.Random(call_seed), own)
        work = operation(call, own.random() < 0.5)
        if work is not None:
            self._in_flight.append((work, call))
        else:
            call.check()
        if own.random() < 0.1:
            time.sleep(own.random() * 2e-3)
        while len(self._in_flight) > own.randint(0, MOST_IN_FLIGHT):
            self._check_one()

    def _check_one(self) -> None:
        work, call = self._in_flight.pop(self._own.randrange(len(self._in_flight)))
        work.wait()
        call.check()
