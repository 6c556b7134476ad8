"""Times a training step and weighs the memory of sharded training beside its peers, in alternating runs.

    python benchmarks/train_step.py --ranks 2 --rounds 3 --output benchmarks/results/train_step.json

Each implementation trains the same GPT on the same batches in processes of its own, `--rounds` times, in turn, so that
a busy machine slows all of them alike. Printed: medians over rounds and each round's ratio to DDP over gloo. The losses
must agree before any time is believed. Memory is the proportional set size at the end minus that before the model
exists, so that shared pages count once; CPU seconds are those of all threads of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPLEMENTATIONS = {
    "ddp gloo": ("gloo", "ddp"),
    "ddp zeropg": ("zeropg", "ddp"),
    "fsdp2 gloo": ("gloo", "fsdp2"),
    "fsdp2 zeropg": ("zeropg", "fsdp2"),
    "zeropg stage 0": ("zeropg", 0),
    "zeropg stage 1": ("zeropg", 1),
    "zeropg stage 2": ("zeropg", 2),
    "zeropg stage 3": ("zeropg", 3),
}
BASELINE = "ddp gloo"


def run_rank(name: str, options: argparse.Namespace, result: Path) -> None:
    """One rank of one run; rank 0 writes the figures of all ranks to `result`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import zeropg
    from zeropg.train.gpt import GPT, GPTConfig
    from zeropg.train.memory import resident_bytes

    backend, kind = IMPLEMENTATIONS[name]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    before = resident_bytes()
    model = GPT(GPTConfig(layers=options.layers, width=options.width, heads=options.width // 64, context=128))
    parameters = sum(p.numel() for p in model.parameters())

    def make_optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    clip = torch.nn.utils.clip_grad_norm_
    if kind == "ddp":
        optimizer = make_optimizer()
        runner = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        runner = fully_shard(model)
        optimizer = make_optimizer()
    else:
        runner = zeropg.fully_shard(model, stage=kind)
        optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), runner)

        def clip(_parameters: object, max_norm: float) -> torch.Tensor:
            return zeropg.clip_grad_norm_(runner, max_norm)

    generator = torch.Generator().manual_seed(1)
    seconds, cpu_seconds, losses = [], [], []
    for step in range(options.warm_up + options.steps):
        batch = torch.randint(256, (options.batch * world_size, 129), generator=generator)[rank::world_size]
        start, cpu_start = time.perf_counter(), time.process_time()
        logits = runner(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        if step >= options.warm_up:
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    mine = torch.tensor([statistics.median(seconds), statistics.median(cpu_seconds), float(resident_bytes() - before)])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        step_s, cpu_s, memory = torch.stack(everyone).max(dim=0).values.tolist()
        figures = {
            "step_s": step_s,
            "cpu_s": cpu_s,
            "memory_bytes": memory,
            "parameters": parameters,
            "loss": losses[-1],
        }
        result.write_text(json.dumps(figures))
    dist.destroy_process_group()


def run_once(name: str, arguments: list[str], ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, __file__, *arguments, "--as-rank-of", name, "--result", str(result)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        run = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if run.returncode != 0:
            raise SystemExit(f"{name} failed:\n{run.stderr}")
        figures: dict[str, float] = json.loads(result.read_text())
        return figures


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 bytes per rank")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    parser.add_argument("--as-rank-of", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank_of:
        run_rank(options.as_rank_of, options, options.result)
        return

    passed = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("steps", "warm_up", "layers", "width", "batch")
    ]
    load_before = os.getloadavg()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in IMPLEMENTATIONS}
    for round_number in range(options.rounds):
        for name in IMPLEMENTATIONS:
            print(f"round {round_number + 1}/{options.rounds}: {name}", file=sys.stderr)
            runs[name].append(run_once(name, passed, options.ranks))
    reference = runs[BASELINE][0]["loss"]
    for name, figures in runs.items():
        if any(abs(run["loss"] - reference) > 1e-3 * reference for run in figures):
            raise SystemExit(
                f"{name} trains to loss {figures[0]['loss']}, {BASELINE} to {reference}: nothing is measured"
            )

    header = {
        "command": "python benchmarks/train_step.py "
        + " ".join([f"--ranks={options.ranks}", f"--rounds={options.rounds}", *passed]),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "parameters": int(runs[BASELINE][0]["parameters"]),
    }
    table = {}
    for name, figures in runs.items():
        ratios = [run["step_s"] / base["step_s"] for run, base in zip(figures, runs[BASELINE], strict=True)]
        cpu = [run["cpu_s"] / base["cpu_s"] for run, base in zip(figures, runs[BASELINE], strict=True)]
        memory = statistics.median(run["memory_bytes"] for run in figures) / header["parameters"]
        table[name] = {
            "step_over_ddp": statistics.median(ratios),
            "cpu_over_ddp": statistics.median(cpu),
            "step_ms": 1000 * statistics.median(run["step_s"] for run in figures),
            "memory_bytes_per_parameter": memory,
        }
    for key, value in header.items():
        print(f"# {key}: {value}")
    print(f"{'':16} {'step / DDP':>10} {'CPU / DDP':>10} {'step ms':>9} {'B/parameter':>12}")
    for name, row in table.items():
        print(
            f"{name:16} {row['step_over_ddp']:10.2f} {row['cpu_over_ddp']:10.2f} {row['step_ms']:9.1f} "
            f"{row['memory_bytes_per_parameter']:12.1f}"
        )
    if options.output:
        options.output.write_text(json.dumps({"header": header, "table": table, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
