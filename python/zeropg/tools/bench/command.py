"""`python -m zeropg bench SUITE`: one harness for all measurements. A suite is a module with `main(arguments)`."""

from __future__ import annotations

import importlib
import sys

# name: (module, what it measures in one line)
SUITES = {
    "collectives": (
        "zeropg.tools.bench.collectives",
        "operations of the process group beside gloo and Open MPI, in nccl-tests' columns",
    ),
    "groups": ("zeropg.tools.bench.groups", "the time to make a process group, beside gloo"),
    "optimizer": (
        "zeropg.tools.bench.optimizer",
        "fused optimizer steps beside torch.optim and the memory's bandwidth",
    ),
    "offload": ("zeropg.tools.bench.offload", "a file tier's bandwidth, and a step through it beside one in memory"),
    "compression": ("zeropg.tools.bench.compression", "what codecs cost, lose and save, beside torch's operations"),
    "load": ("zeropg.tools.bench.load", "weights from files into a sharded model, beside plain reads and FSDP2"),
    "deepspeed": (
        "zeropg.tools.bench.deepspeed.command",
        "one training script under DeepSpeed and, with one line changed, under zeropg",
    ),
    "nodes": ("zeropg.tools.bench.nodes.command", "collectives between nodes, beside gloo and what the links carry"),
    "loss": ("zeropg.tools.bench.loss.command", "the loss, and the time to it over slow links, for each codec"),
    "table": ("zeropg.tools.bench.table", "what the files of the suites say, as Markdown"),
    "train": ("zeropg.tools.bench.train_step", "a training step and its memory beside DDP and FSDP2"),
}

_HELP = """
Every suite first proves its results against a reference. It alternates the peers inside one run, prints medians with
their spread, and puts versions, CPUs, limits and load above them. If other programs keep the CPUs busy, it claims no
ratio and ends with status 3; with --even-if-busy it goes on, and marks the output.

examples:
  python -m zeropg bench collectives -n 2                       all-reduce, 8 B to 64 MiB, zeropg beside gloo
  python -m zeropg bench collectives --op all -d all -e 1M      every operation and dtype
  python -m zeropg bench groups -n 4                            the time until a new group works
  python -m zeropg bench optimizer --threads 2                  AdamW beside torch.optim's three forms
  python -m zeropg bench offload --path /mnt/nvme               a disk, and a step whose state lies there
  python -m zeropg bench compression                            what every codec costs, loses and saves
  python -m zeropg bench train --rounds 3                       stages 0 to 3 beside DDP and FSDP2
  python -m zeropg bench deepspeed --python ds/bin/python       one script under DeepSpeed and under zeropg
  python -m zeropg bench load                                   1 GiB of weights from files, beside reading them
  python -m zeropg bench nodes --case 2x2,racks                 simulated nodes, slow and unequal links
  python -m zeropg bench loss --quick                           codecs on simulated hosts, beside torch's hooks
  python -m zeropg bench table                                  the figures in benchmarks/results, as Markdown
  make bench                                                    the whole set, with plots, into benchmarks/results

python -m zeropg bench SUITE --help explains a suite and lists its options.
"""


def main(arguments: list[str]) -> int:
    """Run the suite that `arguments` name first; returns its exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(len(name) for name in SUITES)
        lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in SUITES.items()]
        print("\n".join(["usage: python -m zeropg bench SUITE [options]", "", "suites:", *lines, _HELP.rstrip()]))
        return 0
    name, *rest = arguments
    if name not in SUITES:
        print(f"zeropg bench: no suite {name!r}; there is {', '.join(SUITES)} (see --help)", file=sys.stderr)
        return 2
    status: int = importlib.import_module(SUITES[name][0]).main(rest)
    return status
