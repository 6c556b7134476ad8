"""`python -m zeropg plan`: memory and traffic per rank, before anything is allocated."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch

from zeropg.compression.codec import Codec, named_codecs
from zeropg.compression.plan import Plan
from zeropg.sharding.offload import TIERS
from zeropg.tools import machine
from zeropg.tools.command_line import make_parser
from zeropg.tools.plan.formulas import OPTIMIZER_SLOTS, Holding, Settings, memory, traffic, with_ranks
from zeropg.tools.plan.shape import ModelShape, shape_of_config, shape_of_gpt
from zeropg.tools.quantities import byte_count, count, size

_DESCRIPTION = """
Computes what each rank of a training run will hold and send. It needs sizes alone: it allocates nothing and starts no
rank. Memory is the peak of a step, by kind and tier. Activations (of the model and the batch) and torch itself (about
300 MB per process) are not in it. Traffic is that of a step with one backward. Several values of --stage or --ranks
make a table.
"""
_EXAMPLES = """
kinds of memory:
  parameters   what the forward reads
  masters      fp32 parameters, beside 16-bit ones; with --weights in stages 1 and 2 beside all
  optimizer    the optimizer's state
  gradients    kept for the step
  buckets      gradients on their way to other ranks
  gathered     units that are whole, where ranks share no memory; with --weights differences on their way
  autograd     the largest single gradient
  residuals    error feedback of compression
  staging      the process group's own

examples:
  python -m zeropg plan --params 7e9 --ranks 8                             stage 3 in fp32 on one node of CPUs
  python -m zeropg plan --params 7e9 --ranks 8 --stage 0,1,2,3 --param-dtype bf16   the stages beside each other
  python -m zeropg plan --params 70e9 --ranks 16 --nodes 2 --device cuda --param-dtype bf16 --offload-optimizer nvme
  python -m zeropg plan --params 7e9 --ranks 16 --nodes 4 --replicas 2 --keep-numel 1e9   copies, and kept units
  python -m zeropg plan --model ./Llama-3-8B --ranks 1,2,4,8 --memory 64G  does it fit? (a folder with a config.json)
  python -m zeropg plan --params 1e9 --ranks 8 --nodes 4 --compression int4 --node-gbps 1.25   seconds on 10 Gbit/s

status: 0; 1 none of the plans fits into --memory; 2 wrong options
"""
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def main(arguments: list[str]) -> int:
    """Plan as `arguments` say; returns the exit status."""
    options, parser = _parse(arguments)
    try:
        shape = shape_of_config(options.model) if options.model else shape_of_gpt(options.params, layers=options.layers)
    except ValueError as error:
        parser.error(str(error))
    base = Settings(
        nodes=options.nodes,
        replicas=options.replicas,
        keep_numel=options.keep_numel,
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        optimizer=options.optimizer,
        device=options.device,
        backend=options.backend,
        offload_optimizer=None if options.offload_optimizer == "none" else options.offload_optimizer,
        compression=named_codecs().get(options.compression),
        weights=named_codecs().get(options.weights),
        no_sync=options.no_sync,
    )
    plans = [with_ranks(base, stage, ranks) for stage in options.stage for ranks in options.ranks]
    if options.json:
        print(json.dumps({"model": _describe(shape), "plans": [_as_dict(shape, plan) for plan in plans]}, indent=2))
    else:
        print(f"{shape.description}: {shape.parameters:,} parameters in {len(shape.units)} units")
        if len(plans) == 1:
            _print_one(shape, plans[0], options)
        else:
            _print_table(shape, plans, options)
    return 0 if any(_fits(shape, plan, options) for plan in plans) else 1


def _print_one(shape: ModelShape, plan: Settings, options: argparse.Namespace) -> None:
    nodes = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes"
    nodes += f", {plan.replicas} copies" if plan.replicas > 1 else ""
    print(f"stage {plan.stage} on {plan.ranks} ranks, {nodes}, {plan.device}, {plan.optimizer}\n")
    holdings = memory(shape, plan)
    print(f"{'memory per rank':22} {'bytes':>12} {'per parameter':>14}  where")
    for holding in holdings:
        if holding.bytes:
            each = holding.bytes / shape.parameters
            print(f"{holding.kind:22} {size(holding.bytes):>12} {each:14.2f}  {_where(holding, plan)}")
    for tier in dict.fromkeys(holding.tier for holding in holdings):
        total = sum(holding.bytes for holding in holdings if holding.tier == tier)
        name = _tier_name(tier, plan)
        print(f"{'sum, ' + name:22} {size(total):>12} {total / shape.parameters:14.2f}")
        if tier != "device" or plan.device == "cpu":
            print(f"{'  of a node':22} {size(total * plan.local_ranks):>12}")
    print(f"\n{'sent per step and rank':42} {'in the node':>12} {'between':>12}")
    rows = traffic(shape, plan)
    for row in rows:
        print(f"{row.what:42} {size(row.inside_bytes):>12} {size(row.between_bytes):>12}")
    between = sum(row.between_bytes for row in rows) * plan.local_ranks
    print(f"{'sum':42} {size(sum(row.inside_bytes for row in rows)):>12} {size(between / plan.local_ranks):>12}")
    if plan.nodes > 1:
        print(f"{'  of a node':42} {'':>12} {size(between):>12}{_seconds(between, options)}")
    print()
    print(_verdict(shape, plan, options))


def _print_table(shape: ModelShape, plans: list[Settings], options: argparse.Namespace) -> None:
    tiers = [tier for tier in ("device", "host", *TIERS) if any(_tier_bytes(shape, plan, tier) for plan in plans)]
    head = "".join(f" {_tier_name(tier, plans[0]) + '/rank':>14}" for tier in tiers)
    print(f"\n{'stage':>5} {'ranks':>6} {'nodes':>6}{head} {'in node/step':>14} {'between/step':>14}  fits")
    for plan in plans:
        rows = traffic(shape, plan)
        columns = "".join(f" {size(_tier_bytes(shape, plan, tier)):>14}" for tier in tiers)
        inside, between = (sum(getattr(row, key) for row in rows) for key in ("inside_bytes", "between_bytes"))
        fits = {True: "yes", False: "no"}[_fits(shape, plan, options)] if options.memory else "-"
        print(
            f"{plan.stage:5} {plan.ranks:6} {plan.nodes:6}{columns} {size(inside):>14} {size(between):>14}  {fits}"
            f"{_seconds(between * plan.local_ranks, options)}"
        )
    if not options.memory:
        print("--memory says what a node (with --device cuda: a GPU) has, and which of these fit")


def _where(holding: Holding, plan: Settings) -> str:
    name = _tier_name(holding.tier, plan)
    return f"{name}, its part of what the node's ranks share" if holding.is_shared else name


def _tier_name(tier: str, plan: Settings) -> str:
    return {"device": "GPU" if plan.device == "cuda" else "memory", "host": "host memory"}.get(tier, tier)


def _tier_bytes(shape: ModelShape, plan: Settings, tier: str) -> int:
    return sum(holding.bytes for holding in memory(shape, plan) if holding.tier == tier)


def _needed(shape: ModelShape, plan: Settings) -> int:
    """What --memory is compared with: one GPU's, or all of a node's."""
    return _tier_bytes(shape, plan, "device") * (1 if plan.device == "cuda" else plan.local_ranks)


def _fits(shape: ModelShape, plan: Settings, options: argparse.Namespace) -> bool:
    return options.memory is None or _needed(shape, plan) <= options.memory


def _verdict(shape: ModelShape, plan: Settings, options: argparse.Namespace) -> str:
    needed, what = _needed(shape, plan), "a GPU" if plan.device == "cuda" else "a node"
    if options.memory is not None:
        answer = "fits" if needed <= options.memory else "does not fit"
        return f"{answer}: {size(needed)} of {size(options.memory)} of {what}, before activations"
    if plan.device == "cuda":
        return f"{what} must hold {size(needed)} and the activations; --memory 80G says whether it does"
    _, available = machine.memory_bytes()
    limit = min(available, machine.cgroup_memory_limit() or available)
    answer = "would fit" if needed <= limit else "would not fit"
    return f"{answer} here: {what} needs {size(needed)} and the activations, this one has {size(limit)}"


def _seconds(between_bytes_of_node: float, options: argparse.Namespace) -> str:
    if options.node_gbps is None:
        return ""
    return f"  {between_bytes_of_node / (options.node_gbps * 1e9):.3g} s at {options.node_gbps:g} GB/s"


def _describe(shape: ModelShape) -> dict[str, Any]:
    return {
        "description": shape.description,
        "parameters": shape.parameters,
        "trainable_parameters": shape.trainable_parameters,
        "units": len(shape.units),
    }


def _as_dict(shape: ModelShape, plan: Settings) -> dict[str, Any]:
    words = (torch.dtype, Codec)
    settings = {key: str(value) if isinstance(value, words) else value for key, value in vars(plan).items()}
    return {
        "settings": settings,
        "memory": [asdict(holding) for holding in memory(shape, plan)],
        "traffic": [asdict(row) for row in traffic(shape, plan)],
    }


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = make_parser("plan", _DESCRIPTION, _EXAMPLES)
    model = parser.add_argument_group("model")
    model.add_argument("--params", type=count, help="number of parameters: 7e9, 350M")
    model.add_argument(
        "--layers", type=int, help="units of the model of --params (default: as many as GPTs of that size have)"
    )
    model.add_argument(
        "--model", help="instead of --params: a folder with a Hugging Face config.json, or a model's name"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "-n", "--ranks", type=_list(1, 1 << 20), default=[2], help="ranks in all; one or a list: 1,2,4 (default 2)"
    )
    run.add_argument("--nodes", type=int, default=1, help="nodes, over which the ranks are spread evenly (default 1)")
    run.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="copies of the model, as with fully_shard(mesh=) of two dimensions; ranks / N share each (default 1)",
    )
    run.add_argument(
        "--stage",
        type=_list(0, 3),
        default=[3],
        help="what is sharded: 0 nothing, 1 the optimizer, 2 also gradients, 3 also parameters; or a list (default 3)",
    )
    run.add_argument(
        "--param-dtype", type=_dtype, help="dtype of computation: bf16, fp16, fp32 (default: the parameters')"
    )
    run.add_argument("--reduce-dtype", type=_dtype, help="dtype of gradients between ranks (default: the masters')")
    run.add_argument("--optimizer", choices=OPTIMIZER_SLOTS, default="adamw", help="optimizer (default adamw)")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes (default cpu)")
    run.add_argument(
        "--backend", choices=("zeropg", "gloo", "nccl"), default="zeropg", help="process group (default zeropg)"
    )
    run.add_argument(
        "--offload-optimizer",
        choices=("none", *TIERS),
        default="none",
        help="where masters and optimizer state lie between steps (default none: in memory)",
    )
    run.add_argument(
        "--compression",
        choices=("none", *named_codecs()),
        default="none",
        help="codec of gradients between nodes (default none)",
    )
    run.add_argument(
        "--weights",
        choices=("none", *named_codecs()),
        default="none",
        help="codec of weights between nodes, in stages 1 to 3 (default none)",
    )
    run.add_argument(
        "--keep-numel",
        type=count,
        default=0,
        help="parameters that stay whole from forward to backward where units are gathered: 1e9 (default none)",
    )
    run.add_argument(
        "--no-sync", action="store_true", help="gradients are accumulated over several backwards, inside no_sync"
    )
    compare = parser.add_argument_group("beside it")
    compare.add_argument(
        "--memory",
        type=byte_count,
        help="memory of a node (with --device cuda: of a GPU), to say whether the plan fits: 64G",
    )
    compare.add_argument("--node-gbps", type=float, help="1e9 bytes/s that a node can send, to add seconds per step")
    compare.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    if (options.params is None) == (options.model is None):
        parser.error("give the model's size with --params 7e9, or its config with --model FOLDER; one of them")
    if options.nodes < 1 or options.nodes > max(options.ranks):
        parser.error(f"--nodes {options.nodes} with --ranks {max(options.ranks)}: each node has at least one rank")
    if options.replicas < 1 or any(ranks % options.replicas for ranks in options.ranks):
        parser.error(f"--replicas {options.replicas} with --ranks {_joined(options.ranks)}: expected a divisor")
    if options.replicas > 1 and options.weights != "none":
        parser.error(f"--weights {options.weights} with --replicas {options.replicas}: no weights travel encoded there")
    if options.weights != "none":
        try:
            Plan(weights=named_codecs()[options.weights])
        except ValueError as error:
            parser.error(f"--weights {options.weights}: {error}")
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers {options.layers} is not positive")
    if options.node_gbps is not None and not options.node_gbps > 0:
        parser.error(f"--node-gbps {options.node_gbps} is not positive")
    return options, parser


def _joined(values: list[int]) -> str:
    return ",".join(map(str, values))


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}; there is {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _list(low: int, high: int) -> Any:
    def parse(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number or list of numbers") from None
        if not all(low <= value <= high for value in values):
            raise argparse.ArgumentTypeError(f"{text}: expected {low} to {high}")
        return values

    return parse
