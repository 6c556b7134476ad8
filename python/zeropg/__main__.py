"""`python -m zeropg COMMAND`: one command, one job each.

A command is a module with `main(arguments: list[str]) -> int`, and one line in COMMANDS. Only the module of the command
that is asked for is imported.
"""

from __future__ import annotations

import importlib
import sys

# name: (module, what it does in one line)
COMMANDS = {
    "bench": (
        "zeropg.tools.bench.command",
        "measure collectives, optimizers, codecs and training steps beside their peers",
    ),
    "config": ("zeropg.tools.config", "say what becomes of each key of a DeepSpeed configuration"),
    "doctor": ("zeropg.tools.doctor.command", "show what is built, what this machine can use, and why not"),
    "export": ("zeropg.tools.export.command", "make safetensors of a checkpoint, ours or DeepSpeed's"),
    "logs": ("zeropg.tools.logs.command", "show the logs of all ranks as one text, and which rank failed first"),
    "plan": ("zeropg.tools.plan.command", "compute memory and traffic of a run per rank, before anything is allocated"),
    "run": ("zeropg.tools.run.command", "start a program on all ranks of one or several hosts, as deepspeed does"),
    "simulate": ("zeropg.tools.simulate", "compute time and bytes of a collective on nodes that need not exist"),
    "topo": ("zeropg.tools.topo", "show which ranks share a node, and what the links between them carry"),
    "trace": ("zeropg.tools.trace.command", "show where the time of a training step goes, unit by unit"),
    "train": (
        "zeropg.tools.train.command",
        "train a small GPT on real text with ZeRO-0 to 3, and export it in 16 bits",
    ),
    "tune": ("zeropg.tools.tune.command", "find the fastest configuration of a script for DeepSpeed, by short runs"),
    "zero_to_fp32": (
        "zeropg.tools.export.zero_to_fp32",
        "write a checkpoint's fp32 weights, as DeepSpeed's script does",
    ),
}

_EXAMPLES = """
examples:
  python -m zeropg doctor                                                what this machine can use, and why not
  python -m zeropg config ds_config.json                                 what becomes of a DeepSpeed configuration
  python -m zeropg export checkpoints out --dtype bfloat16               safetensors of a checkpoint
  python -m zeropg plan --params 7e9 --ranks 8 --stage 0,1,2,3           what each stage would hold and send
  python -m zeropg trace trace                                           where a step's time goes (see trace --help)
  python -m zeropg tune train.py --deepspeed_config ds_config.json       the fastest stage and micro-batch for a script
  python -m zeropg simulate --ranks 8 --nodes 2 --size 64M               what an all-reduce would cost on two nodes
  python -m zeropg run --hostfile hosts train.py                         all ranks of all hosts, as deepspeed does
  python -m zeropg logs logs --failure                                   which rank failed first, and its last lines
  torchrun --standalone --nproc-per-node 4 -m zeropg topo --measure      latency and bandwidth between four ranks
  python -m zeropg bench collectives -n 2                                all-reduce from 8 B to 64 MiB, beside gloo
  torchrun --standalone --nproc-per-node 2 -m zeropg train               ZeRO-3 on two processes of this machine
  torchrun --standalone --nproc-per-node 2 -m zeropg train --stage 1     the same with the optimizer sharded only

python -m zeropg COMMAND --help explains a command and lists its options.
"""


def main(arguments: list[str]) -> int:
    """Run the command that `arguments` name (without the program's name); returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(
            f"zeropg: no command {name!r}; there is {', '.join(COMMANDS)} (see python -m zeropg --help)",
            file=sys.stderr,
        )
        return 2
    module, _ = COMMANDS[name]
    status: int = importlib.import_module(module).main(rest)
    return status


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: python -m zeropg COMMAND [options]", "", "commands:", *lines, _EXAMPLES.rstrip()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
