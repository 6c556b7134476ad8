"""`python -m zeropg bench load`: weights from files into a sharded model, beside plain reads of the same bytes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_load
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.quantities import byte_count

READ = "plain read"
OWN = ("load_pretrained", "load_checkpoint")
FSDP2 = "FSDP2 from rank 0"
_WIDTH = 2048

_DESCRIPTION = """
Times how long the ranks of this machine take to set a model of fp32 matrices from files in stage 3: load_pretrained
from Hugging Face safetensors, and load_checkpoint. Beside them, in turn: each rank reads its part of the safetensors
file into memory that is there already, and nothing else (`plain read`); and FSDP2 over gloo, where rank 0 reads the
file and the others receive (torch's set_model_state_dict). `above the shard` is the largest rank's peak of memory
during the load, less what it held before, which has the shard in it. `read` is what all ranks read from files, over the
size of the weights; FSDP2's file is mapped, and counts as memory. Files come from the page cache, if it has room.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench load                               1 GiB onto two ranks
  python -m zeropg bench load -n 4 --bytes 4G --path /data  4 GiB, from another disk

status: 0 measured; 1 a loaded value was wrong, or a rank failed; 2 wrong options; 3 other programs used the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Starts its own ranks."""
    options = _parse(arguments)
    if options.folder is not None:
        return _run_rank(options)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix=".zeropg-bench-", dir=options.path) as folder:
        if harness.start_ranks(options.ranks, ["bench", "load", *arguments, "--folder", folder]) != 0:
            return harness.WRONG
        runs: dict[str, list[dict[str, float]]] = harness.read_json(Path(folder) / "result.json")
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    facts = harness.header(
        "load",
        arguments,
        quiet,
        ranks=options.ranks,
        rounds=options.rounds,
        bytes=options.bytes,
    )
    rows = [_row(name, runs, quiet.may_claim) for name in runs]
    harness.print_header(facts)
    print(f"{'':18} {'ms':>9} {'x plain read':>18} {'MiB above the shard':>20} {'read':>6}")
    for row in rows:
        times = str(row.figures.get("times_read", "not claimed"))
        memory = row.median("above_shard_mib")
        print(
            f"{row.peer:18} {row.median('time_ms'):9.1f} {times:>18} {memory:20.1f} {row.median('read_weights'):6.2f}"
        )
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")
    return harness.finish(options, quiet, facts, rows, plot_load)


def _row(name: str, all_runs: dict[str, list[dict[str, float]]], may_claim: bool) -> Row:
    runs = all_runs[name]
    figures: dict[str, Spread | float] = {
        "time_ms": Spread.of([1000 * run["seconds"] for run in runs]),
        "above_shard_mib": Spread.of([run["above_shard_bytes"] / 2**20 for run in runs]),
        "read_weights": Spread.of([run["read_share"] for run in runs]),
    }
    if may_claim:
        figures["times_read"] = ratios([run["seconds"] for run in runs], [run["seconds"] for run in all_runs[READ]])
    return Row("load", name, figures)


def _run_rank(options: argparse.Namespace) -> int:
    """One rank; rank 0 writes the figures of all."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    import zeropg
    from zeropg.backend import leave_groups

    torch.set_num_threads(1)
    dist.init_process_group("zeropg")
    gloo = dist.new_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    blocks = max(1, options.bytes // (4 * _WIDTH**2))
    file, checkpoint = options.folder / "model.safetensors", options.folder / "checkpoint"
    if rank == 0:
        generator = torch.Generator().manual_seed(0)
        weights = {f"blocks.{i}.weight": torch.randn(_WIDTH, _WIDTH, generator=generator) for i in range(blocks)}
        save_file(weights, file)
        del weights
    dist.barrier()
    model = zeropg.fully_shard(_matrices(blocks))
    zeropg.load_pretrained(model, options.folder)
    zeropg.save_checkpoint(checkpoint, model)
    right = _digest(model)
    loads: dict[str, Callable[[], Any]] = {
        READ: _plain_read(file, rank, world_size),
        OWN[0]: lambda: zeropg.load_pretrained(model, options.folder),
        OWN[1]: lambda: zeropg.load_checkpoint(checkpoint, model),
        FSDP2: _fsdp2_load(blocks, gloo, file),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    for turn in range(1 + options.rounds):  # the first one opens and imports
        for name in harness.in_turn(loads, turn):
            if name in OWN:
                with zeropg.writable_shards(model) as shards:
                    for _, shard, _, _ in shards:
                        shard.zero_()
            figures = _measure(loads[name], blocks)
            if name in OWN and _digest(model) != right:
                print(f"zeropg bench: {name} set other values; nothing is measured", file=sys.stderr)
                return harness.WRONG
            if turn > 0:
                runs[name].append(figures)
    if rank == 0:
        harness.write_json(options.folder / "result.json", runs)
    leave_groups()
    return 0


def _measure(load: Callable[[], Any], blocks: int) -> dict[str, float]:
    """Loads twice: to look at memory takes time. All ranks call it; the figures of the slowest and largest rank, and
    the sum of what they read.
    """
    import torch
    import torch.distributed as dist

    from zeropg.tools.bench.peak_memory import PeakMemory
    from zeropg.tools.train.memory import resident_bytes

    dist.barrier()
    before = resident_bytes()
    with PeakMemory() as peak:
        load()
    dist.barrier()
    read_before = _read_bytes()
    start = time.perf_counter()
    load()
    took = time.perf_counter() - start
    most = torch.tensor([took, float(max(0, peak.bytes - before))], dtype=torch.float64)
    read = torch.tensor([float(_read_bytes() - read_before)], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(read)
    seconds, above = most.tolist()
    return {"seconds": seconds, "above_shard_bytes": above, "read_share": read.item() / (blocks * 4 * _WIDTH**2)}


def _read_bytes() -> int:
    """What this process has asked files for so far; pages that it has mapped are not in it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))


def _matrices(blocks: int) -> Any:
    import torch
    from torch import nn

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(blocks))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with torch.device("meta"):
        return Matrices()


def _digest(model: Any) -> float:
    """Of all weights; every rank calls it."""
    import torch
    import torch.distributed as dist

    import zeropg

    sums = torch.zeros(2, dtype=torch.float64)
    for number, (_, shard, _, _) in enumerate(zeropg.local_shards(model)):
        values = shard.double()
        sums += torch.stack([values.sum(), values.square().sum() / (1 + number)])
    dist.all_reduce(sums)
    return float(sums[0] + sums[1])


def _plain_read(file: Path, rank: int, world_size: int) -> Callable[[], Any]:
    """Reads this rank's part of the file into memory that is there."""
    import torch

    size = file.stat().st_size
    start, stop = size * rank // world_size, size * (rank + 1) // world_size
    memory: Any = memoryview(torch.zeros(stop - start, dtype=torch.uint8).numpy())  # type: ignore[arg-type]

    def read() -> None:
        done = 0
        with file.open("rb", buffering=0) as opened:
            while done < len(memory):
                done += os.preadv(opened.fileno(), [memory[done:]], start + done)

    return read


def _fsdp2_load(blocks: int, gloo: Any, file: Path) -> Callable[[], Any]:
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(gloo, "cpu")
    model = _matrices(blocks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")

    def load() -> None:
        state: dict[str, Any] = load_file(file) if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    return load


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("load", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/load.json")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks to start (default 2)")
    parser.add_argument("--bytes", type=byte_count, default=1 << 30, help="size of the weights (default 1G)")
    parser.add_argument("--path", type=Path, help="a folder for the files (default: that of temporary files)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default 5)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.ranks, options.rounds) < 1:
        parser.error("--ranks and --rounds must be positive")
    if options.path is not None and not options.path.is_dir():
        parser.error(f"--path {options.path} is no folder")
    if harness.is_a_rank() and options.folder is None:
        parser.error("this suite starts its own ranks: run it without torchrun, with --ranks")
    return options
