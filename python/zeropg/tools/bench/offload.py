"""`python -m zeropg bench offload`: a tier's bandwidth, and a step through it beside one without."""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeropg
from zeropg._native import _C
from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_offload
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.quantities import byte_count, count

_DESCRIPTION = """
Times the file tier at --path in one process. First it measures the bandwidth: it writes a vector through the tier and
reads it back, beside plain pwrite and pread of one thread past the page cache. Then it measures the cost: an optimizer
step with its state in the tier, beside the same step in memory. Both steps must give the same parameters to the bit
before any time is believed.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench offload --path /mnt/nvme                          1 GiB, and 50 million parameters
  python -m zeropg bench offload --path /mnt/nvme --threads 8 --buffer 256M    more threads, larger buffers

status: 0 measured; 1 a result was wrong; 2 wrong options; 3 other programs used the CPUs
"""
_PLAIN_PIECE = 4 << 20
_BLOCKS = 8


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. One process."""
    options = _parse(arguments)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    torch.set_num_threads(1)
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from torch's list of exports
    dist.init_process_group("zeropg", store=store, rank=0, world_size=1)
    try:
        measured = _bandwidth(options)
        step = _step(options) if measured else None
    except OSError as error:
        print(f"zeropg bench: --path {options.path}: {error}", file=sys.stderr)
        return harness.WRONG
    finally:
        dist.destroy_process_group()
    if measured is None or step is None:
        print("zeropg bench: the tier changed what went through it; nothing is measured", file=sys.stderr)
        return harness.WRONG
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    tier, bandwidth = measured
    if not quiet.may_claim:
        step[0].figures.pop("time_over_memory")
    facts = harness.header(
        "offload",
        arguments,
        quiet,
        path=str(options.path),
        tier=tier,
        bytes=options.bytes,
        numel=options.numel,
    )
    harness.print_header(facts)
    _print(bandwidth, step, quiet)
    return harness.finish(options, quiet, facts, bandwidth + step, plot_offload)


def _print(bandwidth: list[Row], step: list[Row], quiet: harness.Quiet) -> None:
    for row in bandwidth:
        print(f"{row.case:6} {row.peer:16} {row.median('gbps'):7.2f} GB/s")
    tier, memory = step
    print(
        f"\nstep in memory {memory.median('time_ms'):.1f} ms, through the tier {tier.median('time_ms'):.1f} ms",
        end="; ",
    )
    print(f"{tier.median('gbps'):.2f} GB/s of state read and written")
    if quiet.may_claim:
        print(f"times slower through the tier: {tier.figures['time_over_memory']}")
    else:
        print(f"# ratio not claimed: {quiet.refusal()}")


def _bandwidth(options: argparse.Namespace) -> tuple[str, list[Row]] | None:
    """What the tier is, and its GB/s and those of plain system calls, in turn; None where it returned other bytes."""
    tier = _C.make_offload(
        device="nvme",
        directory=str(options.path),
        threads=options.threads,
        is_pinned=False,
        buffer_bytes=options.buffer,
        rank=0,
        world_size=1,
    )
    numel = options.bytes // 4
    values = torch.arange(numel, dtype=torch.int32).view(torch.float32)
    vector = _C.TieredVector(tier, "a vector of the benchmark", numel, torch.float32)
    vector.write(0, values)
    if not torch.equal(vector.read(0, numel).view(torch.int32), values.view(torch.int32)):
        return None
    with _PlainFile(options.path, options.bytes) as plain:
        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("write", "zeropg's tier"): lambda: vector.write(0, values),
            ("read", "zeropg's tier"): lambda: vector.read(0, numel),
            ("write", "one plain thread"): plain.write,
            ("read", "one plain thread"): plain.read,
        }
        seconds: dict[tuple[str, str], list[float]] = {each: [] for each in calls}
        for turn in range(options.rounds):
            for each in harness.in_turn(calls, turn):
                start = time.perf_counter()
                calls[each]()
                seconds[each].append(time.perf_counter() - start)
    rows = [
        Row(case, peer, {"gbps": Spread.of([options.bytes / took / 1e9 for took in times])})
        for (case, peer), times in seconds.items()
    ]
    return tier.describe(), rows


class _PlainFile:
    """pwrite and pread of one thread, with O_DIRECT where the file system has it."""

    def __init__(self, folder: Path, size: int) -> None:
        self._size = size // _PLAIN_PIECE * _PLAIN_PIECE or _PLAIN_PIECE
        self._piece = mmap.mmap(-1, _PLAIN_PIECE)
        descriptor, name = tempfile.mkstemp(prefix=".zeropg-bench-", dir=folder)
        os.unlink(name)
        path = f"/proc/self/fd/{descriptor}"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            self._file = os.open(path, os.O_RDWR)
        os.close(descriptor)
        os.posix_fallocate(self._file, 0, self._size)

    def write(self) -> None:
        for offset in range(0, self._size, _PLAIN_PIECE):
            os.pwrite(self._file, self._piece, offset)

    def read(self) -> None:
        for offset in range(0, self._size, _PLAIN_PIECE):
            os.preadv(self._file, [self._piece], offset)

    def __enter__(self) -> _PlainFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._piece.close()


def _step(options: argparse.Namespace) -> list[Row] | None:
    """A step with AdamW's state in the tier and in memory, in turn, a row each; None where the results differ."""
    place = zeropg.Offload(device="nvme", path=options.path, buffer_bytes=options.buffer, threads=options.threads)
    pairs = {"memory": _model(options.numel, None), "tier": _model(options.numel, place)}
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for turn in range(1 + options.rounds):  # the first one allocates the state
        for name in harness.in_turn(pairs, turn):
            model, optimizer = pairs[name]
            model(torch.ones(1, model.width)).square().mean().backward()
            start = time.perf_counter()
            optimizer.step()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
            optimizer.zero_grad()
    states = [zeropg.full_state_dict(model, rank0_only=False) for model, _ in pairs.values()]
    if not all(torch.equal(states[0][name], states[1][name]) for name in states[0]):
        return None
    numel = sum(value.numel() for value in states[0].values())
    state_bytes = 2 * 8 * numel  # two moments in fp32, read and written
    through: dict[str, Spread | float] = {
        "time_ms": Spread.of([1000 * took for took in seconds["tier"]]),
        "gbps": Spread.of([state_bytes / took / 1e9 for took in seconds["tier"]]),
        "time_over_memory": ratios(seconds["tier"], seconds["memory"]),
    }
    memory: dict[str, Spread | float] = {"time_ms": Spread.of([1000 * took for took in seconds["memory"]])}
    return [Row("step", "in the tier", through), Row("step", "in memory", memory)]


class _Matrices(nn.Module):
    """Square matrices one after another: mostly parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _model(numel: int, place: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Matrices(max(1, round((numel / _BLOCKS) ** 0.5)))
    zeropg.fully_shard(model, stage=3, offload_optimizer=place)
    return model, zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("offload", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/offload.json")
    parser.add_argument("--path", type=Path, required=True, help="an existing folder on the disk to measure")
    parser.add_argument("--bytes", type=byte_count, default=1 << 30, help="bytes of the vector (default 1G)")
    parser.add_argument(
        "--numel", type=count, default=50_000_000, help="number of parameters of the step: 100M (default 50M)"
    )
    parser.add_argument("--threads", type=int, default=4, help="threads that read and write the file (default 4)")
    parser.add_argument(
        "--buffer", type=byte_count, default=64 << 20, help="bytes of the tier's staging buffers (default 64M)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default 5)")
    options = parser.parse_args(arguments)
    if min(options.threads, options.rounds) < 1:
        parser.error("--threads and --rounds must be positive")
    if options.bytes < 4096:
        parser.error(f"--bytes {options.bytes} is less than a page")
    if not options.path.is_dir():
        parser.error(f"--path {options.path} is no folder")
    return options
