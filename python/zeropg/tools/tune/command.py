"""`python -m zeropg tune`: finds the fastest stage and micro-batch of a script by short runs, and writes its JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zeropg.deepspeed.config import Config, ConfigError
from zeropg.deepspeed.config.batch import batch_sizes
from zeropg.deepspeed.config.read import examine
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.observation.trial import Sizes
from zeropg.tools import machine
from zeropg.tools.command_line import make_parser
from zeropg.tools.plan.formulas import Settings
from zeropg.tools.quantities import byte_count, size
from zeropg.tools.tune.candidates import (
    Candidate,
    config_of,
    micro_batches,
    needed_bytes,
    plan_of,
    sent_bytes,
    shape_of,
)
from zeropg.tools.tune.search import Outcome, Row, Search, Space
from zeropg.tools.tune.stop import Stopped, stopped_by_signals
from zeropg.tools.tune.trial import Script, TrialFailed, config_argument

_DESCRIPTION = """
Finds the fastest configuration of a script for DeepSpeed: any that takes --deepspeed_config FILE and trains with
zeropg.deepspeed.initialize. It runs the script for a few steps with one candidate after the other, each in new
processes, and writes the configuration that won. The script needs no change: the engine reports its own speed, and
ends the script after those steps.

What is tuned: the stage (0 to 3) and the micro-batch. The samples of a step (train_batch_size) stay, and so do dtypes,
the optimizer, where its state lies (offload_optimizer) and everything else that changes what is learnt: all candidates
train alike. With --nvme_path the optimizer's state goes to a disk, but only where no stage fits without. Steps that the
loss scale of fp16 leaves out are not timed. Sizes of buckets and thresholds have no effect here, so there is nothing
to tune in them; how far ahead stage 3 gathers stays as the configuration says.
"""
_EXAMPLES = """
how it goes:
  1. one start tells the sizes of the model; `zeropg plan`'s formulas leave out the stages that do not fit
  2. in the highest stage, which needs the least memory, it climbs from micro-batch 1 to larger ones, as long as they
     fit and are not clearly slower
  3. it compares the other stages with the best micro-batch, and looks beside it
  4. what came within 7 % of the best is run again, in turns (--rounds); the median decides

examples:
  python -m zeropg tune --num_gpus 2 train.py --deepspeed_config ds_config.json
  python -m zeropg tune --num_gpus 2 --output tuned.json --steps 20 train.py --deepspeed_config ds_config.json
  python -m zeropg tune --run "--hostfile hosts --bind_cores" train.py --deepspeed_config ds_config.json
  python -m zeropg tune --num_gpus 2 --stages 2,3 --memory 16G train.py --deepspeed_config ds_config.json

The script should give the model train_micro_batch_size_per_gpu samples at once, as engine.training_dataloader does:
speeds with other batches cannot be compared, and tune says so.

status: 0 found; 1 nothing fits, or the script fails; 2 wrong options; 143 SIGTERM: the run of the moment is stopped
"""
_COLUMNS = ("stage", "micro-batch", "accumulation", "disk", "plan", "peak", "sent/rank", "samples/s", "of best", "why")


def main(arguments: list[str]) -> int:
    """Tune as `arguments` say; returns the exit status."""
    options, parser = _parse(arguments)
    try:
        with stopped_by_signals():
            return _tune(options, parser)
    except Stopped as stopped:
        print(f"zeropg tune: {stopped}: the run is stopped", file=sys.stderr)
        return 128 + stopped.number


def _tune(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        base = load(options.deepspeed_config)
        script = Script(_run_options(options), options.command, options.timeout)
        sizes = script.sizes(base)
        train_batch = _train_batch(base, sizes.world_size)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    except TrialFailed as error:
        print(f"{error}\nzeropg tune: the script failed before it had an engine", file=sys.stderr)
        return 1
    tuner = _Tuner(base, train_batch, sizes, script, options)
    best = tuner.search()
    print(tuner.table(best))
    if best is None:
        print("zeropg tune: no candidate could be run; the table says why", file=sys.stderr)
        return 1
    config = config_of(base, best.candidate, tuner.train_batch, sizes.world_size)
    options.output.write_text(json.dumps(config, indent=2) + "\n")
    print(f"\n{best.candidate} won: {options.output}")
    return 0


class _Tuner:
    """What the search is told, and what is shown of it."""

    def __init__(
        self, base: dict[str, Any], train_batch: int, sizes: Sizes, script: Script, options: argparse.Namespace
    ) -> None:
        self.train_batch = train_batch
        self._base = base
        self._sizes = sizes
        self._script = script
        self._options = options
        self._shape = shape_of(sizes)
        self._notes: dict[str, None] = {}
        self._search: Search | None = None

    def search(self) -> Row | None:
        """Runs candidates, with a bar; returns the best one."""
        batches = micro_batches(self.train_batch, self._sizes.world_size)
        memory_bytes = self._options.memory or _memory_bytes(self._sizes)
        space = Space(
            self._options.stages, batches, self._options.nvme_path, self._planned_bytes, self._refusal, memory_bytes
        )
        print(
            f"{self._shape.parameters:,} parameters, {self._sizes.world_size} ranks, "
            f"{self.train_batch} samples per step, "
            f"{size(memory_bytes)} of {'a GPU' if self._sizes.device == 'cuda' else 'a node'}"
        )
        most = len(batches) + len(self._options.stages) + 2
        with tqdm(total=most, unit="run", file=sys.stderr, leave=False, disable=not sys.stderr.isatty()) as bar:

            def run(candidate: Candidate) -> Outcome:
                bar.set_description(str(candidate))
                outcome = self._time(candidate)
                bar.total = max(bar.total, bar.n + 2)
                bar.update()
                return outcome

            self._search = Search(space, run, self._options.rounds)
            return self._search.best()

    def table(self, best: Row | None) -> str:
        """A line for each candidate, the fastest first, then those that were not run."""
        assert self._search is not None  # search() comes first
        rows = sorted(self._search.rows.values(), key=lambda row: (-row.speed, row.candidate))
        cells = [list(_COLUMNS), *(self._cells(row, best) for row in rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS) - 1)]
        lines = [
            "  ".join([*(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=False)), line[-1]])
            for line in cells
        ]
        return "\n".join([*lines, *(f"Note: {note}" for note in self._notes)])

    def _cells(self, row: Row, best: Row | None) -> list[str]:
        candidate, problem = row.candidate, row.problem.splitlines()[-1] if row.problem else ""
        accumulation = self.train_batch // (candidate.micro_batch * self._sizes.world_size)
        plan = self._plan(candidate)
        sent = sent_bytes(self._shape, plan, accumulation)
        why = ": ".join(part for part in (row.why, problem) if part)
        return [
            str(candidate.stage),
            str(candidate.micro_batch),
            str(accumulation),
            "yes" if plan.offload_optimizer == "nvme" else "no",
            size(row.planned_bytes),
            size(row.peak_bytes) if row.peak_bytes else "-",
            size(sent),
            f"{row.speed:.1f}" if row.speeds else "-",
            f"{row.speed / best.speed:.0%}" if best is not None and row.speeds else "-",
            f"the fastest ({why})" if row is best else why,
        ]

    def _time(self, candidate: Candidate) -> Outcome:
        try:
            report = self._script.time(
                self._config(candidate), warm_up=self._options.warm_up, steps=self._options.steps
            )
        except TrialFailed as error:
            return Outcome(None, problem=str(error))
        if report.rows is not None and report.rows != report.micro_batch:
            self._notes[
                f"the script gave the model {report.rows} samples at once, and not the {report.micro_batch} of "
                "train_micro_batch_size_per_gpu: these speeds are not comparable"
            ] = None
        local = report.peak_bytes[: self._sizes.local_world_size]
        peak = max(local) if self._sizes.device == "cuda" else sum(local)
        return Outcome(report.samples / statistics.median(report.seconds), peak)

    def _refusal(self, candidate: Candidate) -> str:
        """Why the configuration cannot be used, though another stage's may be; "" where it can."""
        try:
            found = examine(self._config(candidate))
        except ConfigError as error:
            return error.problems[0]
        return next(iter([*found.refused, *map(str, found.unfilled)]), "")

    def _plan(self, candidate: Candidate) -> Settings:
        return plan_of(examine(self._config(candidate)).config, candidate, self._sizes)

    def _planned_bytes(self, candidate: Candidate) -> int:
        return needed_bytes(self._shape, self._plan(candidate))

    def _config(self, candidate: Candidate) -> dict[str, Any]:
        return config_of(self._base, candidate, self.train_batch, self._sizes.world_size)


def _train_batch(base: dict[str, Any], ranks: int) -> int:
    """Samples of a step. Raises ConfigError where the configuration cannot be used."""
    found: Config = examine(base).config
    if found.tensor_parallel.size > 1:
        raise ConfigError(
            [
                f"tensor_parallel.autotp_size is {found.tensor_parallel.size}, of which tune's plan knows nothing; "
                "tune without it, and compare the two by hand"
            ]
        )
    sizes = (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps)
    return batch_sizes(*sizes, ranks).train_batch_size


def _memory_bytes(sizes: Sizes) -> int:
    if sizes.device == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    _, available = machine.memory_bytes()
    return min(available, machine.cgroup_memory_limit() or available)


def _run_options(options: argparse.Namespace) -> list[str]:
    counted = [] if options.num_gpus is None else ["--num_gpus", str(options.num_gpus)]
    return [*counted, *shlex.split(options.run)]


def _stages(text: str) -> list[int]:
    try:
        stages = sorted({int(part) for part in text.split(",")})
    except ValueError:
        stages = [-1]
    if not set(stages) <= {0, 1, 2, 3}:
        raise argparse.ArgumentTypeError(f"{text!r}; expected stages like 0,1,2,3")
    return stages


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = make_parser(
        "tune",
        _DESCRIPTION,
        _EXAMPLES,
        usage="python -m zeropg tune [options] SCRIPT [arguments] --deepspeed_config FILE [arguments]",
    )
    parser.add_argument("--num_gpus", "--nproc-per-node", type=int, metavar="N", help="ranks of each host")
    parser.add_argument("--run", default="", metavar="OPTIONS", help="further options of python -m zeropg run")
    parser.add_argument("--stages", type=_stages, default=[0, 1, 2, 3], help="stages to try (default 0,1,2,3)")
    parser.add_argument("--nvme_path", default="", metavar="DIR", help="for the optimizer's state, where nothing fits")
    parser.add_argument(
        "--memory",
        type=byte_count,
        metavar="SIZE",
        help="of a node, with GPUs of a GPU: 64G (default: what is free here)",
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps that are timed in a run (default 8)")
    parser.add_argument("--warm_up", type=int, default=2, metavar="N", help="steps before them (default 2)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="further runs of the near ones (default 2)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for one run (default 600)")
    parser.add_argument(
        "--output", type=Path, default=Path("ds_config_tuned.json"), help="(default ds_config_tuned.json)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script and its arguments")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("expected a script and its arguments")
    options.deepspeed_config = config_argument(options.command)
    if options.deepspeed_config is None:
        parser.error("expected --deepspeed_config FILE among the script's arguments: the configuration to begin with")
    for name, least in (("steps", 1), ("warm_up", 0), ("rounds", 0), ("timeout", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, expected at least {least}")
    return options, parser
