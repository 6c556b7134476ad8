"""`compression="auto"`: what pays on the link and the processors that there are, by measuring it."""

import math
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
_MOST_CHOSEN_FOR = 1 << 28  # beyond it the choice stays the same
_WANTED_SECONDS = 0.05  # of one measured all-reduce as it is, at most
_ROUNDS = 3


class Measured(NamedTuple):
    """What one candidate took."""

    codec: Codec | None
    seconds: tuple[float, ...]  # of an all-reduce of each of the sizes: the median of rounds of the slowest rank

    def expected(self, numel: int, numels: Sequence[int]) -> float:
        """Seconds for `numel` values: along the line through what was measured; below it, as for the least."""
        least, most = numels[0], numels[-1]
        if numel <= least or least == most:
            return self.seconds[0] * max(numel, least) / least
        per_value = max(0.0, self.seconds[-1] - self.seconds[0]) / (most - least)
        return self.seconds[0] + per_value * (numel - least)


@dataclass(frozen=True)
class Choice:
    """What `choose` found. The same on every rank.

    rows: (values that a reduction has at least, codec or None for as it is), ascending. Larger reductions never get
      what loses less.
    numels: of the fp32 tensors that were measured, ascending.
    measured: one entry for each candidate.
    """

    rows: tuple[tuple[int, Codec | None], ...]
    numels: tuple[int, ...] = ()
    measured: tuple[Measured, ...] = ()

    @property
    def codec(self) -> Codec | None:
        """Of the largest reductions."""
        return self.rows[-1][1]

    def codec_of(self, numel: int) -> Codec | None:
        """Of a reduction of `numel` values."""
        return [codec for least, codec in self.rows if least <= numel][-1]

    def __str__(self) -> str:
        if not self.measured:
            return f"{_name(self.codec)}: all ranks share a node, where memory is faster than any codec"
        numel = self.numels[-1]
        times = ", ".join(f"{_name(each.codec)} {1e3 * each.seconds[-1]:.2f} ms" for each in self.measured)
        chosen = next(each for each in self.measured if each.codec == self.codec)
        gain = self.measured[0].seconds[-1] / chosen.seconds[-1]
        why = f"{gain:.1f} times as fast as fp32" if self.codec is not None else "nothing is clearly faster"
        smaller = [
            f"{_name(codec)} below {_size(above)}"
            for (_, codec), (above, _) in zip(self.rows, self.rows[1:], strict=False)
        ]
        less = f"; {', '.join(reversed(smaller))}" if smaller else ""
        return f"{_name(self.codec)}, {why} ({_size(numel)} of fp32: {times}){less}"


def choose(backend: Any, *, candidates: Sequence[Codec | None] = CANDIDATES) -> Choice:
    """Measures all-reduces with each candidate and returns what to use. Collective; a second at most.

    backend: of zeropg. Ranks that all share a node compress nothing, which is not measured. A candidate that loses more
    must take less than 0.9 of the time of the one that is chosen so far.
    """
    if len(backend.topology().nodes) == 1:
        return Choice(((0, None),))
    plain = [_measure(backend, candidates[0], _LEAST_NUMEL)]
    numels = [_LEAST_NUMEL]
    while numels[-1] < _MOST_NUMEL and 4 * plain[-1] <= _WANTED_SECONDS:
        numels.append(4 * numels[-1])
        plain.append(_measure(backend, candidates[0], numels[-1]))
    ends = (numels[0],) if len(numels) == 1 else (numels[0], numels[-1])
    measured = [Measured(candidates[0], tuple(plain[numels.index(numel)] for numel in ends))]
    for codec in candidates[1:]:
        measured.append(Measured(codec, tuple(_measure(backend, codec, numel) for numel in ends)))
    return Choice(_rows(measured, ends), ends, tuple(measured))


def _rows(measured: Sequence[Measured], numels: Sequence[int]) -> tuple[tuple[int, Codec | None], ...]:
    rows: list[tuple[int, Codec | None]] = []
    chosen = 0
    for exponent in range(int(math.log2(numels[0])), int(math.log2(_MOST_CHOSEN_FOR)) + 1):
        numel = 1 << exponent
        for index in range(chosen + 1, len(measured)):
            if measured[index].expected(numel, numels) < _CLEARLY_FASTER * measured[chosen].expected(numel, numels):
                chosen = index
        codec = measured[chosen].codec
        if not rows or rows[-1][1] != codec:
            rows.append((numel if rows else 0, codec))
    return tuple(rows)


class Auto:
    """The codecs of one model's reductions: measured now, and again when these become slower or faster. Collective.

    backend: of the group that has the model, on which it is measured.
    watched: of the groups on which the reductions run.
    calls: from one comparison to the next.

    All ranks count the same calls, and compare at the same ones.
    """

    _CHANGE = 2.0  # of the time per byte

    def __init__(self, backend: Any, watched: Sequence[Any], *, calls: int) -> None:
        self._backend, self._watched = backend, list(watched)
        self._every, self._calls = calls, 0
        self.choice = choose(backend)
        _say(backend, f"gradients travel as {self.choice}")
        self._before = self._reduced()
        self._usual: float | None = None  # seconds per byte of the rank that waited least

    def next_call(self) -> bool:
        """Counts a call; True where the choice was made anew. Collective at every `calls`th call."""
        self._calls += 1
        if self._calls % self._every != 0:
            return False
        seconds, size = (now - before for now, before in zip(self._reduced(), self._before, strict=True))
        fastest = torch.tensor([seconds / size if size else math.inf], dtype=torch.float64)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._backend.allreduce([fastest], options).wait()
        self._before = self._reduced()
        now = fastest.item()
        if not math.isfinite(now):
            return False
        if self._usual is None:
            self._usual = now
        if self._usual / self._CHANGE <= now <= self._usual * self._CHANGE:
            return False
        was, self.choice = self.choice, choose(self._backend)
        _say(self._backend, f"the link has changed; instead of {_name(was.codec)} now {self.choice}")
        self._usual, self._before = None, self._reduced()
        return True

    def _reduced(self) -> tuple[float, float]:
        """Seconds and bytes of this rank's reductions so far."""
        counted = [of for backend in self._watched for name, of in backend.stats().items() if "reduce" in name]
        return math.fsum(of["seconds"] for of in counted), math.fsum(of["bytes"] for of in counted)


def plan_of_auto(backend: Any) -> Plan | None:
    """What may travel encoded, whatever is chosen: nothing where all ranks share a node."""
    return None if len(backend.topology().nodes) == 1 else Plan(gradients=CANDIDATES[-1])


def _say(backend: Any, what: str) -> None:
    if backend.rank() == 0:
        print(f"[zeropg] compression auto: {what}", file=sys.stderr)


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
        _C.compressed_all_reduce(
            backend, tensor, compressor, None, [], dist.ReduceOp.AVG, async_op=False, meter=_C.CodecMeter()
        )


def _name(codec: Codec | None) -> str:
    return "fp32" if codec is None else codec.make_compressor().description


def _size(numel: int) -> str:
    return f"{4e-6 * numel:,.1f} MB" if numel >= 1 << 18 else f"{4e-3 * numel:,.0f} kB"
