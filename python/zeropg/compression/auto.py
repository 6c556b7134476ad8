"""`compression="auto"`: what pays on the link and the processors that there are, by measuring it."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from zeropg._native import _C
from zeropg.compression.codec import Bf16, BlockQuant, Codec
from zeropg.compression.plan import Plan

# In order of what they lose. What loses less is kept until the next one is clearly faster: 4 bits are the least that
# training with Adam does not notice (DeepSpeed ZeRO++, section 5; measured in benchmarks/README.md).
CANDIDATES: tuple[Codec | None, ...] = (None, Bf16(error_feedback=False), BlockQuant(8), BlockQuant(4))
_CLEARLY_FASTER = 0.9  # of the time of what loses less

_LEAST_NUMEL, _MOST_NUMEL = 1 << 14, 1 << 20  # of what is measured: 64 KiB to 4 MiB of fp32
_WANTED_SECONDS = 0.05  # of one measured all-reduce as it is, at most
_ROUNDS = 3


class Measured(NamedTuple):
    """What one candidate took."""

    codec: Codec | None
    seconds: float  # of an all-reduce of `numel` floats: the median of rounds of the slowest rank


@dataclass(frozen=True)
class Choice:
    """What `choose` found. The same on every rank.

    codec: None: as it is.
    numel: of the fp32 tensors that were measured.
    measured: one entry for each candidate.
    """

    codec: Codec | None
    numel: int
    measured: tuple[Measured, ...]

    @property
    def plan(self) -> Plan | None:
        return None if self.codec is None else Plan(gradients=self.codec)

    @property
    def seconds(self) -> float:
        """What the chosen codec took."""
        return next(each.seconds for each in self.measured if each.codec == self.codec)

    def __str__(self) -> str:
        if not self.measured:
            return f"{_name(self.codec)}: all ranks share a node, where memory is faster than any codec"
        megabytes = 4e-6 * self.numel
        times = ", ".join(f"{_name(each.codec)} {1e3 * each.seconds:.2f} ms" for each in self.measured)
        gain = self.measured[0].seconds / self.seconds
        why = f"{gain:.1f} times as fast as fp32" if self.codec is not None else "nothing is clearly faster"
        return f"{_name(self.codec)}, {why} ({megabytes:.1f} MB of fp32: {times})"


def choose(backend: Any, *, candidates: Sequence[Codec | None] = CANDIDATES) -> Choice:
    """Measures all-reduces with each candidate and returns what to use. Collective; a fraction of a second.

    backend: of zeropg. Ranks that all share a node compress nothing, which is not measured. A candidate that loses more
    must take less than 0.9 of the time of the one that is chosen so far.
    """
    if len(backend.topology().nodes) == 1:
        return Choice(None, 0, ())
    numel = _LEAST_NUMEL
    while True:
        plain = _measure(backend, candidates[0], numel)
        if numel >= _MOST_NUMEL or 4 * plain > _WANTED_SECONDS:
            break
        numel *= 4
    measured = [Measured(candidates[0], plain)]
    measured += [Measured(codec, _measure(backend, codec, numel)) for codec in candidates[1:]]
    best = measured[0]
    for each in measured[1:]:
        if each.seconds < _CLEARLY_FASTER * best.seconds:
            best = each
    return Choice(best.codec, numel, tuple(measured))


def say(backend: Any, choice: Choice, *, was: Codec | None = None, is_first: bool = True) -> None:
    """One line on rank 0: what was chosen, and why."""
    if backend.rank() == 0:
        what = "gradients travel as" if is_first else f"the link has changed; instead of {_name(was)} now"
        print(f"[zeropg] compression auto: {what} {choice}", file=sys.stderr)


class Watch:
    """Notices that reductions take another time than when their codec was chosen.

    All ranks count the same calls, and compare at the same ones. Any thread may end a call.
    """

    _CALLS = 100  # from one comparison to the next
    _CHANGE = 2.0  # of the median time per element

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._calls = 0
        self._times: list[float] = []  # seconds per element since the last comparison
        self._usual: float | None = None

    def begin_call(self) -> bool:
        """Counts a call; True where it is time to choose again. Collective at every hundredth call."""
        self._calls += 1
        if self._calls % self._CALLS != 0:
            return False
        times, self._times = self._times, []
        slowest = torch.tensor([statistics.median(times) if times else 0.0], dtype=torch.float64)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._backend.allreduce([slowest], options).wait()
        now = slowest.item()
        if self._usual is None or now == 0:
            self._usual = now or None
            return False
        if self._usual / self._CHANGE <= now <= self._usual * self._CHANGE:
            return False
        self._usual = None
        return True

    def end_call(self, seconds: float, numel: int) -> None:
        self._times.append(seconds / max(1, numel))


def _measure(backend: Any, codec: Codec | None, numel: int) -> float:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(backend.rank()))
    seconds = []
    for _ in range(_ROUNDS + 1):
        backend.barrier().wait()
        start = time.perf_counter()
        _all_reduce(backend, tensor, codec)
        seconds.append(time.perf_counter() - start)
        tensor.mul_(1e-3)
    # Of the slowest rank, in each round: so all ranks find the same. The first round warms up.
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    backend.allreduce([slowest], options).wait()
    return float(statistics.median(slowest.tolist()))


def _all_reduce(backend: Any, tensor: torch.Tensor, codec: Codec | None) -> None:
    if codec is None:
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        backend.allreduce([tensor], options).wait()
    else:
        compressor = codec.make_compressor()
        _C.compressed_all_reduce(backend, tensor, compressor, None, [], dist.ReduceOp.AVG, async_op=False)


def _name(codec: Codec | None) -> str:
    return "fp32" if codec is None else codec.make_compressor().description
