"""`python -m zeropg bench deepspeed`: one script under DeepSpeed and, with one line changed, under zeropg."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_deepspeed
from zeropg.tools.bench.results import Row, Spread, ratios

PACKAGES = {"deepspeed": "deepspeed", "zeropg": "zeropg.deepspeed"}  # peer: what the script imports
BASELINE = "deepspeed"
_SAME_LOSS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}  # relative, at every step
_SCRIPT = "zeropg.tools.bench.deepspeed.script"

_DESCRIPTION = """
Trains a small GPT-2 on real text with one and the same script: under DeepSpeed over gloo, and with the one line
`import deepspeed` changed to `import zeropg.deepspeed as deepspeed`. The losses of all steps must agree before any time
is believed (1e-5 in fp32), and in fp16 the loss scales. Figures are those of the slowest (for memory, the largest)
rank: the median of a step, and the largest proportional set size while the model is made and the first steps run, less
that before the model exists. AdamW with a warm-up of the learning rate and clipping to norm 1.

--python names the Python that has DeepSpeed, with zeropg beside it, for instance a virtual environment with
`pip install deepspeed==0.19.8`.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench deepspeed --python ds/bin/python                 stages 0 to 3: about 15 minutes
  python -m zeropg bench deepspeed --case 2,3x4 --rounds 1                stage 2, and stage 3 with 4 micro-batches
  python -m zeropg bench deepspeed --case 2:fp16,3:bf16                   in 16 bits

status: 0 measured; 1 losses differ or a rank failed; 2 wrong options; 3 other programs used the CPUs
"""


@dataclass(frozen=True)
class Case:
    """A stage, how many micro-batches an update takes, and a dtype; written STAGE[xMICRO_BATCHES][:DTYPE]."""

    stage: int
    micro_batches: int = 1
    dtype: str = "fp32"

    @classmethod
    def parse(cls, text: str) -> Case:
        shape, _, dtype = text.partition(":")
        stage, _, micro_batches = shape.partition("x")
        case = cls(int(stage), int(micro_batches or 1), dtype or "fp32")
        if case.stage not in range(4) or case.micro_batches < 1 or case.dtype not in _SAME_LOSS:
            raise ValueError(text)
        return case

    def __str__(self) -> str:
        micro_batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"stage {self.stage}, {self.dtype}{micro_batches}"

    def config(self, micro_batch: int) -> dict[str, Any]:
        """DeepSpeed's configuration; it states what the versions of DeepSpeed have different defaults for."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
            "zero_optimization": {"stage": self.stage},
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        return config


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Starts its own ranks."""
    options = _parse(arguments)
    version = _version(options.python)
    if version is None:
        print(f"zeropg bench: {options.python} cannot import deepspeed and zeropg; see --help", file=sys.stderr)
        return 2
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    runs: dict[Case, dict[str, list[dict[str, Any]]]] = {case: {peer: [] for peer in PACKAGES} for case in options.case}
    for turn in range(options.rounds):
        for case, of_case in runs.items():
            for peer in harness.in_turn(PACKAGES, turn):
                print(f"round {turn + 1}/{options.rounds}: {case}, {peer}", file=sys.stderr, flush=True)
                result = _run_once(peer, case, options)
                if result is None:
                    print(f"zeropg bench: {peer} failed in {case}; nothing is measured", file=sys.stderr)
                    return harness.WRONG
                of_case[peer].append(result)
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    for case, of_case in runs.items():
        if difference := disagreement(case, of_case):
            print(f"zeropg bench: {case}: {difference}; nothing is measured", file=sys.stderr)
            return harness.WRONG
    return _report(options, arguments, quiet, version, runs)


def disagreement(case: Case, of_case: dict[str, list[dict[str, Any]]]) -> str:
    """Where the peers' losses or loss scales part, in words; empty where they agree."""
    reference = of_case[BASELINE][0]
    for peer, results in of_case.items():
        for result in results:
            if (apart := _loss_difference(result, reference)) > _SAME_LOSS[case.dtype]:
                return f"losses of {peer} differ by {apart:.1e}: {result['losses']}, expected {reference['losses']}"
            if case.dtype == "fp16" and result["loss_scales"] != reference["loss_scales"]:
                return f"loss scales of {peer} are {result['loss_scales']}, expected {reference['loss_scales']}"
    return ""


def _loss_difference(result: dict[str, Any], reference: dict[str, Any]) -> float:
    pairs = zip(result["losses"], reference["losses"], strict=True)
    return float(max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs))


def _report(
    options: argparse.Namespace,
    arguments: list[str],
    quiet: harness.Quiet,
    version: str,
    runs: dict[Case, dict[str, list[dict[str, Any]]]],
) -> int:
    parameters = int(next(iter(runs.values()))[BASELINE][0]["parameters"])
    facts = harness.header(
        "deepspeed",
        arguments,
        quiet,
        ranks=options.ranks,
        rounds=options.rounds,
        parameters=parameters,
        deepspeed=version,
    )
    rows = [
        _row(case, peer, results, of_case[BASELINE], quiet.may_claim)
        for case, of_case in runs.items()
        for peer, results in of_case.items()
    ]
    harness.print_header(facts)
    print(f"{'':28} {'':10} {'step / DeepSpeed':>18} {'memory / DeepSpeed':>18} {'step ms':>9} {'MiB':>7} {'loss':>8}")
    for row in rows:
        step, memory = (str(row.figures.get(f"{key}_over_deepspeed", "not claimed")) for key in ("step", "memory"))
        print(
            f"{row.case:28} {row.peer:10} {step:>18} {memory:>18} {row.median('step_ms'):9.1f} "
            f"{row.median('memory_mib'):7.0f} {row.median('loss_difference'):8.0e}"
        )
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")
    return harness.finish(options, quiet, facts, rows, plot_deepspeed)


def _row(case: Case, peer: str, results: list[dict[str, Any]], baseline: list[dict[str, Any]], may_claim: bool) -> Row:
    figures: dict[str, Spread | float] = {
        "step_ms": Spread.of([1000 * result["step_s"] for result in results]),
        "memory_mib": Spread.of([result["memory_bytes"] / 2**20 for result in results]),
        "process_mib": Spread.of([result["process_bytes"] / 2**20 for result in results]),
        "loss_difference": max(_loss_difference(result, baseline[0]) for result in results),
    }
    if may_claim:
        for key, of in {"step": "step_s", "memory": "memory_bytes", "process": "process_bytes"}.items():
            mine, theirs = ([result[of] for result in each] for each in (results, baseline))
            figures[f"{key}_over_deepspeed"] = ratios(mine, theirs)
    return Row(str(case), peer, figures)


def _run_once(peer: str, case: Case, options: argparse.Namespace) -> dict[str, Any] | None:
    """What rank 0 of the script wrote; None where it failed, and then what it printed is shown."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        shape = {key: getattr(options, key) for key in ("layers", "width", "context", "steps", "warm_up")}
        harness.write_json(job, shape | {"config": case.config(options.batch)})
        launcher = [options.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        run = subprocess.run(
            [*launcher, "-m", _SCRIPT, PACKAGES[peer], str(job), str(result)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
        )
        if run.returncode != 0 or not result.exists():
            print(run.stdout + run.stderr, file=sys.stderr)
            return None
        return harness.read_json(result)


def _version(python: str) -> str | None:
    """Which DeepSpeed `python` has; None where it lacks that, or zeropg."""
    program = "import json, importlib.metadata as m, zeropg; print(json.dumps(m.version('deepspeed')))"
    try:
        found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(json.loads(found.stdout.splitlines()[-1]))


def _cases(text: str) -> list[Case]:
    try:
        return [Case.parse(each) for each in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of STAGE[xMICRO_BATCHES][:DTYPE], like 2,3x4,1:bf16"
        ) from error


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("deepspeed", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/deepspeed.json")
    parser.add_argument(
        "--python", default=sys.executable, help="the Python with DeepSpeed and zeropg (default: this one)"
    )
    parser.add_argument(
        "--case",
        type=_cases,
        default="0,1,2,3,0x4,1x4,2x4,3x4",
        help="STAGE[xMICRO_BATCHES][:DTYPE], several with commas (default: %(default)s); dtypes: fp32, bf16, fp16",
    )
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks to start (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each package (default 3)")
    parser.add_argument("--steps", type=int, default=8, help="timed updates per turn (default 8)")
    parser.add_argument("-w", "--warm-up", type=int, default=3, help="updates before these (default 3)")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the GPT-2 (default 6)")
    parser.add_argument("--width", type=int, default=512, help="channels of the GPT-2, a multiple of 64 (default 512)")
    parser.add_argument("--context", type=int, default=64, help="bytes of a sequence (default 64)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch of a rank (default 1)")
    options = parser.parse_args(arguments)
    for name in ("ranks", "rounds", "steps", "layers", "width", "context", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive")
    if options.warm_up < 1:
        parser.error("--warm-up must be positive: memory is looked at meanwhile")
    if options.width % 64 != 0:
        parser.error(f"--width {options.width} is no multiple of 64, the width of a head")
    if harness.is_a_rank():
        parser.error("this suite starts its own ranks: run it without torchrun, with --ranks")
    return options
