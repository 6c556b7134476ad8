"""`python -m zeropg bench train`: a training step, its CPU time and its memory, beside DDP and FSDP2."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.hosts import UNLIMITED, sent_bytes, start_on_hosts
from zeropg.tools.bench.plot import plot_train
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.lab.lab import missing

_KEPT = "stage 3, units kept"  # from forward to backward: where they are gathered, which is between hosts
# name: (process group, wrapper or ZeRO stage)
IMPLEMENTATIONS: dict[str, tuple[str, str | int]] = {
    "ddp gloo": ("gloo", "ddp"),
    "ddp zeropg": ("zeropg", "ddp"),
    "fsdp2 gloo": ("gloo", "fsdp2"),
    "fsdp2 zeropg": ("zeropg", "fsdp2"),
    "zeropg stage 0": ("zeropg", 0),
    "zeropg stage 1": ("zeropg", 1),
    "zeropg stage 2": ("zeropg", 2),
    "zeropg stage 3": ("zeropg", 3),
    "stage 3 over gloo": ("gloo", 3),
    _KEPT: ("zeropg", 3),
}
BASELINE = "ddp gloo"
_FSDP2 = "fsdp2 gloo"
_SHAPE = ("steps", "warm_up", "layers", "width", "batch", "tokens")  # what a rank has to be told
_SAME_LOSS = 1e-3  # relative, after the last step
_TIMEOUT_S = 3600.0  # of one run on simulated hosts

_DESCRIPTION = """
Trains one GPT on the same batches with each implementation in turn, each time in processes of its own. The losses must
agree before any time is believed. The figures are those of the slowest (for memory, the largest) rank: the median step;
the CPU seconds of all its threads per step; and its memory, the proportional set size at the end minus that before the
model exists, so that pages which ranks share count once. Ratios are to DDP over gloo with torch's fused AdamW.

Where FSDP2 over gloo is among them, the step is beside its step too.

With --hosts the ranks are on simulated hosts (Linux network namespaces on this machine), joined by links of the rate
--link in each direction. Then `sent` is what the busiest host's interface sends in a step, in multiples of the weights.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench train                                           9 implementations, 3 rounds: about 5 minutes
  python -m zeropg bench train --only "zeropg stage 3" --rounds 1        that and the baseline, once
  python -m zeropg bench train --layers 12 --width 1088 --batch 1        171 million parameters
  python -m zeropg bench train -n 4 --hosts 2 --link 1gbit --layers 10   30 million, between two hosts

status: 0 measured; 1 losses differ or a rank failed; 2 wrong options; 3 other programs used the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Starts its own ranks."""
    options = _parse(arguments)
    if options.as_rank_of:
        return _run_rank(options.as_rank_of, options)
    absent = missing() if options.hosts > 1 else None
    if absent:
        print(f"zeropg bench: no hosts to simulate: {absent}", file=sys.stderr)
        return 2
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in _chosen(options)}
    for round_number in range(options.rounds):
        for name in runs:
            print(f"round {round_number + 1}/{options.rounds}: {name}", file=sys.stderr, flush=True)
            figures = _run_once(name, options)
            if figures is None:
                print(f"zeropg bench: {name} failed; nothing is measured", file=sys.stderr)
                return harness.WRONG
            runs[name].append(figures)
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    reference = runs[BASELINE][0]["loss"]
    for name, figures_of_rounds in runs.items():
        for figures in figures_of_rounds:
            if abs(figures["loss"] - reference) > _SAME_LOSS * reference:
                print(
                    f"zeropg bench: {name} trains to loss {figures['loss']}, {BASELINE} to {reference}: "
                    "nothing is measured",
                    file=sys.stderr,
                )
                return harness.WRONG
    return _report(options, arguments, quiet, runs)


def _report(
    options: argparse.Namespace,
    arguments: list[str],
    quiet: harness.Quiet,
    runs: dict[str, list[dict[str, float]]],
) -> int:
    parameters = int(runs[BASELINE][0]["parameters"])
    facts = harness.header(
        "train",
        arguments,
        quiet,
        ranks=options.ranks,
        hosts=options.hosts,
        link=options.link,
        rounds=options.rounds,
        parameters=parameters,
    )
    rows = [_row(name, runs, quiet.may_claim, options.hosts > 1) for name in runs]
    harness.print_header(facts)
    columns = {"step_over_ddp": "step / DDP", "cpu_over_ddp": "CPU s / DDP"}
    if _FSDP2 in runs:
        columns["step_over_fsdp2"] = "step / FSDP2"
    sent = f" {'sent':>6}" if options.hosts > 1 else ""
    heads = "".join(f" {head:>18}" for head in columns.values())
    print(f"{'':20}{heads} {'step ms':>9} {'bytes/parameter':>16}{sent}")
    for row in rows:
        cells = "".join(f" {row.figures.get(key, 'not claimed')!s:>18}" for key in columns)
        sent = f" {row.median('sent_weights'):6.2f}" if options.hosts > 1 else ""
        print(
            f"{row.peer:20}{cells} {row.median('step_ms'):9.1f} {row.median('memory_bytes_per_parameter'):16.1f}{sent}"
        )
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")
    return harness.finish(options, quiet, facts, rows, plot_train)


def _row(name: str, all_runs: dict[str, list[dict[str, float]]], may_claim: bool, counts_sent: bool) -> Row:
    runs, baseline, fsdp2 = all_runs[name], all_runs[BASELINE], all_runs.get(_FSDP2)
    figures: dict[str, Spread | float] = {
        "step_ms": Spread.of([1000 * run["step_s"] for run in runs]),
        "cpu_ms": Spread.of([1000 * run["cpu_s"] for run in runs]),
        "memory_bytes_per_parameter": Spread.of([run["memory_bytes"] / run["parameters"] for run in runs]),
        "loss": Spread.of([run["loss"] for run in runs]),
    }
    if counts_sent:
        figures["sent_weights"] = Spread.of([run["sent_bytes"] / (4 * run["parameters"]) for run in runs])
    if may_claim:
        for key in ("step", "cpu"):
            mine, theirs = ([run[f"{key}_s"] for run in each] for each in (runs, baseline))
            figures[f"{key}_over_ddp"] = ratios(mine, theirs)
        if fsdp2 is not None:
            figures["step_over_fsdp2"] = ratios([run["step_s"] for run in runs], [run["step_s"] for run in fsdp2])
    return Row("step", name, figures)


def _run_once(name: str, options: argparse.Namespace) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        shape = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in _SHAPE]
        arguments = ["bench", "train", *shape, "--as-rank-of", name]
        arguments += ["--result", str(result)]
        if options.hosts > 1:
            has_worked = start_on_hosts(
                arguments,
                hosts=options.hosts,
                ranks_per_host=options.ranks // options.hosts,
                link=options.link,
                timeout=_TIMEOUT_S,
            )
        else:
            has_worked = harness.start_ranks(options.ranks, arguments, quiet_output=True) == 0
        return harness.read_json(result) if has_worked else None


def _run_rank(name: str, options: argparse.Namespace) -> int:
    """One rank of one run; rank 0 writes the figures of the slowest rank."""
    import torch
    import torch.distributed as dist

    from zeropg.backend import leave_groups  # the import registers the backend where the package is not installed

    backend, kind = IMPLEMENTATIONS[name]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    _measure_rank(kind, options, {"keep_numel": 1 << 60} if name == _KEPT else {})
    leave_groups()
    return 0


def _measure_rank(kind: str | int, options: argparse.Namespace, limits: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from zeropg.tools.train.gpt import GPT, GPTConfig
    from zeropg.tools.train.memory import resident_bytes

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    before = resident_bytes()
    heads, tokens = options.width // 64, options.tokens
    model = GPT(GPTConfig(layers=options.layers, width=options.width, heads=heads, context=tokens))
    parameters = sum(p.numel() for p in model.parameters())
    runner, optimizer, clip = _wrap(kind, model, limits)
    generator = torch.Generator().manual_seed(1)
    seconds, cpu_seconds, loss_sum, sent_before = [], [], torch.zeros(()), 0.0
    for step in range(options.warm_up + options.steps):
        if step == options.warm_up:
            sent_before = sent_bytes()
        batch = torch.randint(256, (options.batch * world_size, tokens + 1), generator=generator)[rank::world_size]
        start, cpu_start = time.perf_counter(), time.process_time()
        logits = runner(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        loss_sum = loss.detach().clone()
        dist.all_reduce(loss_sum)  # part of the step: nearly every user logs it
        if step >= options.warm_up:
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    sent = (sent_bytes() - sent_before) / options.steps
    memory = float(resident_bytes() - before)
    mine = torch.tensor([statistics.median(seconds), statistics.median(cpu_seconds), memory, sent])
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    if rank == 0:
        step_s, cpu_s, memory, sent = mine.tolist()
        figures = {"step_s": step_s, "cpu_s": cpu_s, "memory_bytes": memory, "sent_bytes": sent}
        figures["parameters"] = parameters
        harness.write_json(options.result, figures | {"loss": loss_sum.item() / world_size})


def _wrap(kind: str | int, model: Any, limits: dict[str, Any]) -> tuple[Any, Any, Callable[[], Any]]:
    """The wrapped model, its optimizer, and clipping to norm 1 as its users do it."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import zeropg

    def fused() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    if kind == "ddp":
        optimizer = fused()
        runner: Any = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        runner = fully_shard(model)
        optimizer = fused()
    else:
        runner = zeropg.fully_shard(model, stage=int(kind), **limits)
        optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), runner)
        return runner, optimizer, lambda: zeropg.clip_grad_norm_(runner, 1.0)
    return runner, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _chosen(options: argparse.Namespace) -> list[str]:
    wanted = (BASELINE, *options.only) if options.only else tuple(IMPLEMENTATIONS)
    return [name for name in IMPLEMENTATIONS if name in wanted and (name != _KEPT or options.hosts > 1)]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("train", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/train_step_2_ranks.json")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks to start (default 2)")
    parser.add_argument("--hosts", type=int, default=1, help="simulated hosts that the ranks are on (default 1)")
    parser.add_argument(
        "--link", default=UNLIMITED, help=f"rate of each host's link, as tc writes it (default {UNLIMITED})"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each implementation (default 3)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per turn (default 8)")
    parser.add_argument("-w", "--warm-up", type=int, default=3, help="steps before these (default 3)")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the GPT (default 6)")
    parser.add_argument("--width", type=int, default=512, help="channels of the GPT, a multiple of 64 (default 512)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (default 2)")
    parser.add_argument("--tokens", type=int, default=128, help="bytes of a sequence, each a token (default 128)")
    parser.add_argument(
        "--only",
        action="append",
        choices=IMPLEMENTATIONS,
        help="run this one beside the baseline; may be repeated (default: all)",
    )
    parser.add_argument("--as-rank-of", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.hosts < 1 or options.ranks % options.hosts:
        parser.error(f"--hosts {options.hosts} with --ranks {options.ranks}: expected a divisor")
    if options.hosts == 1 and options.link != UNLIMITED:
        parser.error(f"--link {options.link} is between hosts: give --hosts 2, or more")
    for name in ("ranks", "rounds", "steps", "layers", "width", "batch", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive")
    if options.width % 64 != 0:
        parser.error(f"--width {options.width} is no multiple of 64, the width of a head")
    if harness.is_a_rank() and not options.as_rank_of:
        parser.error("this suite starts its own ranks: run it without torchrun, with --ranks")
    return options
