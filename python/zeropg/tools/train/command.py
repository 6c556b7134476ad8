"""`python -m zeropg train`: the whole story of a run, from the command line to the exported file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import zeropg
from zeropg.backend import leave_groups
from zeropg.compression.report import report
from zeropg.sharding.state import state_of
from zeropg.tools.plan.formulas import Settings, paper_bytes
from zeropg.tools.plan.shape import shape_of
from zeropg.tools.train.export import check_export, export, generate, load_plain
from zeropg.tools.train.gpt import GPT
from zeropg.tools.train.loop import Batch, train
from zeropg.tools.train.memory import measured_bytes, memory_table, planned_bytes
from zeropg.tools.train.options import Options, parse
from zeropg.tools.train.report import figures, plot_losses
from zeropg.tools.train.text import TrainingBatches, load_text, validation_batches

_VALIDATION_TOKENS = 2048  # per batch: enough to keep a core busy, little beside the activations of a training step

_WRONG_USE = 2
_INTERRUPTED = 130  # the shell's status for SIGINT


def main(arguments: list[str]) -> int:
    """Train with the settings in `arguments`; returns the exit status. Under torchrun every rank calls it."""
    # torchrun's variables; without them this is the only process.
    rank, world_size, local_world_size = (
        int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    )
    options = parse(arguments, rank=rank, world_size=world_size, local_world_size=local_world_size)
    try:
        batches, validation = _read_text(options, rank, world_size)
    except (RuntimeError, ValueError) as error:
        if rank == 0:
            print(f"python -m zeropg train: error: {error}", file=sys.stderr)
        return _WRONG_USE
    try:
        _open_process_group(options)
        _run(options, batches, validation)
    except KeyboardInterrupt:
        # No good-bye to the other ranks: they may be past answering. Each was interrupted, or will see this one gone.
        print(f"[zeropg rank {rank}/{world_size}] train: interrupted", file=sys.stderr)
        return _INTERRUPTED
    leave_groups()
    return 0


def _read_text(options: Options, rank: int, world_size: int) -> tuple[TrainingBatches, list[Batch]]:
    text = load_text()
    context = options.model.context
    batches = TrainingBatches(
        text.training, context=context, batch=options.batch, seed=options.seed, rank=rank, world_size=world_size
    )
    return batches, validation_batches(
        text.validation,
        context=context,
        batch=max(1, _VALIDATION_TOKENS // context),
        rank=rank,
        world_size=world_size,
    )


def _open_process_group(options: Options) -> None:
    if "RANK" in os.environ:
        dist.init_process_group(options.backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from torch's list of exports
        dist.init_process_group(options.backend, store=store, rank=0, world_size=1)


def _run(options: Options, batches: TrainingBatches, validation: list[Batch]) -> None:
    start = time.perf_counter()
    say = _say_on_rank_0(options)
    torch.set_num_threads(options.threads)
    device = _device(options)

    torch.manual_seed(options.seed)  # the same first weights on every rank
    model: nn.Module = GPT(options.model).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"GPT of {parameters:,} parameters in {str(options.param_dtype).removeprefix('torch.')}; ZeRO stage "
        f"{options.stage} over {options.backend}; ranks: {dist.get_world_size()}, threads each: {options.threads}"
    )
    settings = Settings(
        stage=options.stage,
        ranks=dist.get_world_size(),
        nodes=dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        param_dtype=options.param_dtype,
        device=options.device,
        backend=options.backend,
        compression=None if options.compression == "auto" else options.compression,  # nobody knows yet
    )
    planned = planned_bytes(shape_of(model), settings)
    zeropg.fully_shard(model, stage=options.stage, param_dtype=options.param_dtype, compression=options.compression)
    history, optimizer = train(
        model,
        batches,
        validation,
        steps=options.steps,
        lr=options.lr,
        checkpoint=options.checkpoint,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
    )
    loss = history.validation[-1][1]
    say(f"validation loss after {options.steps} steps: {loss:.4f} nats/byte, {loss / math.log(2):.3f} bits/byte")

    compressed = None if state_of(model, "train").coding is None else report(model)
    if compressed is not None:
        say(f"\nrank 0's {compressed}")
    measured = measured_bytes(model, optimizer)
    formula = paper_bytes(options.stage, dist.get_world_size(), parameters, options.param_dtype)
    say(f"\nmemory of the largest of {dist.get_world_size()} ranks:")
    say(memory_table(measured, planned, formula, parameters, history.peak_process_bytes))

    file = export(model, options.output)
    plain = load_plain(file, options.model, options.param_dtype, device)
    exported_loss = check_export(plain, validation, loss, options.param_dtype)
    say(f"\n{file}, {file.stat().st_size:,} bytes: the same loss, {exported_loss:.4f}, in a plain torch.nn.Module")
    if dist.get_rank() != 0:
        return

    sample = generate(plain, prompt="The ", length=500)
    (options.output / "sample.txt").write_text(sample + "\n")
    say(f"\na sample of its text:\n{sample}\n")
    results = figures(options, history) | {
        "parameters": parameters,
        "exported_loss_nats_per_byte": exported_loss,
        "compression_report": None if compressed is None else dataclasses.asdict(compressed),
        "memory_bytes": measured,
        "memory_planned_bytes": planned,
        "memory_formula_bytes": formula,
        "total_seconds": time.perf_counter() - start,
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot_losses(history, options.output / "loss.png")
    say(
        f"{results['total_seconds']:.0f} s in all; while training {results['tokens_per_second']:,.0f} tokens/s, "
        f"{results['communication_share']:.1%} of the time in communication; everything is in {options.output}"
    )
    if options.json:
        print(json.dumps(results))


def _device(options: Options) -> torch.device:
    if options.device != "cuda":
        return torch.device(options.device)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _say_on_rank_0(options: Options) -> Callable[[str], None]:
    if dist.get_rank() != 0:
        return lambda text: None
    return functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
