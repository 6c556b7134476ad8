"""`python -m zeropg bench loss`: loss, and time to a loss, over slow links, for each way to send gradients."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.hosts import UNLIMITED, start_on_hosts
from zeropg.tools.bench.loss.arms import ARMS, BASELINE, PLAIN
from zeropg.tools.bench.loss.journal import Journal, Place
from zeropg.tools.bench.loss.outcome import Job, Outcome
from zeropg.tools.bench.loss.rank import run_jobs
from zeropg.tools.bench.loss.rows import Study, rows_of
from zeropg.tools.bench.loss.tasks import TASKS
from zeropg.tools.bench.plot import plot_loss
from zeropg.tools.bench.results import Row
from zeropg.tools.lab.lab import missing

SWEEP = (0.5, 1.0, 2.0)  # factors of a task's learning rate
_VALIDATIONS = 12  # points of a curve
_SAME_LOSS = 0.02  # relative, of arms that send fp32, at the first validation

_DESCRIPTION = """
Trains two small tasks on simulated hosts (Linux network namespaces on this machine, joined by links that `tc` limits)
with each way to send gradients: DDP over gloo in fp32 and with torch's own hooks, DDP over zeropg with each codec, and
ZeRO stage 2. Each arm takes the best of three learning rates, of its own sweep on seed 0, and then trains with
`--seeds` seeds, whose batches are the same in every arm.

Losses come from runs on links without a limit, times and bytes from `--timed-steps` steps on the limited link: the time
to a loss is the steps to it times the median step. --end-to-end trains on the limited link instead, and takes the
seconds as they passed. Validation is never in the time. `to loss` is the time until the validation loss is that of
DDP over gloo in fp32 at its end plus 0.02, both as medians over the seeds. Differences are paired by seed, with a 95 %
interval (Student). `--seeds 0` trains nothing to its end: only steps are timed.
Bytes are what all hosts' interfaces sent, headers and acknowledgements included. `encode`, `decode` and `wire` are of
zeropg's collectives per step, the mean of all ranks; with DDP the backward pass hides a part of them.

Needs root, or a kernel that lets users make namespaces (`python -m zeropg bench loss` says what is missing).
"""
_EXAMPLES = """
examples:
  python -m zeropg bench loss --quick                                       a few minutes: 2 seeds, 24 steps
  python -m zeropg bench loss --links 100mbit,1gbit --seeds 5               the whole of it: some hours on two cores
  python -m zeropg bench loss --task digits --arm "ddp zeropg int4" --quick one arm beside the baseline
  python -m zeropg bench loss --links 100mbit --end-to-end --seeds 3        nothing combined: as it passes
  python -m zeropg bench loss --task text --arm "ddp zeropg auto" --links 50mbit,1gbit --seeds 0   a step on each link

status: 0 measured; 1 losses differ or a rank failed; 2 wrong options, or no hosts; 3 others were using the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. Starts its own hosts and ranks."""
    options = _parse(arguments)
    if options.as_rank_of:
        plan = harness.read_json(options.as_rank_of)
        run_jobs([Job(**each) for each in plan["jobs"]], Place(**plan["place"]), Journal(options.keep))
        return 0
    absent = missing()
    if absent:
        print(f"zeropg bench: no hosts to simulate: {absent}", file=sys.stderr)
        return 2
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    arms = _choose_arms(options)
    try:
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal((options.keep or Path(folder) / "journal.jsonl").resolve())
            studies = [study for task in options.task for study in _studies(task, arms[task], journal, options)]
    except RuntimeError as error:
        print(f"zeropg bench: {error}; nothing is measured", file=sys.stderr)
        return harness.WRONG
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    rows = [row for study in studies for row in rows_of(study, may_claim=quiet.may_claim)]
    facts = harness.header(
        "loss",
        arguments,
        quiet,
        hosts=options.hosts,
        ranks=options.hosts * options.ranks_per_host,
        steps=options.steps,
        seeds=options.seeds,
        end_to_end=options.end_to_end,
        absent=arms["absent"],
    )
    harness.print_header(facts)
    _print(rows, quiet)
    return harness.finish(options, quiet, facts, rows, plot_loss)


def _choose_arms(options: argparse.Namespace) -> dict[str, Any]:
    """{task: names of its arms, "absent": [why]}; says which ones are left out."""
    chosen: dict[str, Any] = {"absent": []}
    for name in list(options.task):
        why = TASKS[name].missing()
        if why:
            chosen["absent"].append(f"{name}: {why}")
            options.task.remove(name)
    asked = [name for name in ARMS if not options.arm or name in options.arm]
    needed = {*asked, *PLAIN.values(), *(ARMS[name].warms_up_as for name in asked)}
    wanted = [name for name in ARMS if name in needed]
    for name in list(wanted):
        why = ARMS[name].missing()
        if why:
            chosen["absent"].append(f"{name}: {why}")
            wanted.remove(name)
    for line in chosen["absent"]:
        print(f"# absent: {line}", file=sys.stderr)
    return chosen | {task: [name for name in wanted if task in ARMS[name].tasks] for task in options.task}


def _studies(task: str, arms: list[str], journal: Journal, options: argparse.Namespace) -> list[Study]:
    """One for each link."""
    every = math.ceil(options.steps / _VALIDATIONS)
    factors = _sweep(task, arms, every, journal, options) if options.seeds else dict.fromkeys(arms, 1.0)
    runs = [Job(task, arm, factors[arm], seed, options.steps, every) for arm in arms for seed in range(options.seeds)]
    studies = []
    outcomes: list[Outcome] = []
    if runs and not options.end_to_end:
        outcomes = _run(runs, None, journal, options)
        _check(runs, outcomes)
    for link in options.links:
        timed = []
        if options.end_to_end:
            outcomes = _run(runs, link, journal, options)
            _check(runs, outcomes)
        else:
            steps = {arm: ARMS[arm].whole_cycles(options.timed_steps) for arm in arms}
            jobs = [Job(task, arm, factors[arm], 0, steps[arm], timed=True) for arm in arms]
            timed = _run(jobs, link, journal, options)
        by_arm = {arm: [outcome for job, outcome in zip(runs, outcomes, strict=True) if job.arm == arm] for arm in arms}
        studies.append(Study(task, link, options.steps, factors, by_arm, dict(zip(arms, timed, strict=False))))
    return studies


def _sweep(task: str, arms: list[str], every: int, journal: Journal, options: argparse.Namespace) -> dict[str, float]:
    """The factor of the learning rate with the lowest loss on seed 0, for each arm.

    In whole runs: in shorter ones a warm-up would be shorter than the rise of the learning rate.
    """
    jobs = [Job(task, arm, factor, 0, options.steps, every) for arm in arms for factor in SWEEP]
    losses = dict(zip(jobs, (outcome.curve[-1][1] for outcome in _run(jobs, None, journal, options)), strict=True))
    finite = {job: loss if math.isfinite(loss) else math.inf for job, loss in losses.items()}
    return {arm: min((job for job in jobs if job.arm == arm), key=lambda job: finite[job]).lr_factor for arm in arms}


def _check(jobs: list[Job], outcomes: list[Outcome]) -> None:
    """Raises RuntimeError where arms that send fp32 come to different losses with one learning rate and seed."""
    first = {(job.arm, job.lr_factor): outcome.curve[0][1] for job, outcome in zip(jobs, outcomes, strict=True)}
    for (arm, factor), loss in first.items():
        truth = first.get((BASELINE, factor))
        if truth is not None and arm in (*PLAIN.values(), "stage 2 fp32") and abs(loss - truth) > _SAME_LOSS * truth:
            raise RuntimeError(f"{arm} comes to loss {loss} where {BASELINE} comes to {truth}")


def _run(jobs: list[Job], link: str | None, journal: Journal, options: argparse.Namespace) -> list[Outcome]:
    """On hosts of their own, but for those in the journal. Raises RuntimeError with what a failed rank printed."""
    place = Place(link, options.hosts, options.ranks_per_host, machine.commit())
    with tempfile.TemporaryDirectory() as folder:
        wanted = [job for job in jobs if job not in journal.outcomes(place, jobs)]
        kept = f", {len(jobs) - len(wanted)} more are in {journal.path}" if len(wanted) < len(jobs) else ""
        print(f"# {len(wanted)} runs over {link or 'links without a limit'}{kept}", file=sys.stderr, flush=True)
        if wanted:
            plan = Path(folder) / "jobs.json"
            harness.write_json(
                plan, {"jobs": [dataclasses.asdict(job) for job in wanted], "place": dataclasses.asdict(place)}
            )
            with journal.progress(place, wanted):
                _launch(["--as-rank-of", str(plan), "--keep", str(journal.path)], link, options)
        outcomes = journal.outcomes(place, jobs)
        return [outcomes[job] for job in jobs]


def _launch(arguments: list[str], link: str | None, options: argparse.Namespace) -> None:
    has_worked = start_on_hosts(
        ["bench", "loss", *arguments],
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        link=link,
        timeout=options.timeout,
    )
    if not has_worked:
        raise RuntimeError(f"a rank failed, or took more than {options.timeout:g} s (--timeout)")


def _print(rows: list[Row], quiet: harness.Quiet) -> None:
    heads = (
        *(("loss", 9), ("difference, 95 %", 24), ("right %", 8), ("difference, 95 %", 24)),
        *(("step ms", 9), ("kB/step", 9), ("encode", 7), ("decode", 7), ("wire", 7)),
        *(("s in all", 9), ("to loss", 9), ("x faster", 9)),
    )
    for case, link in dict.fromkeys((row.case, row.parameters["link"]) for row in rows if "step" not in row.parameters):
        print(f"\n{case}, {link}\n{'':28}" + "".join(f" {head:>{width}}" for head, width in heads))
        for row in rows:
            if row.case == case and row.parameters["link"] == link and "step" not in row.parameters:
                print(
                    f"{row.peer:28}"
                    + "".join(f" {cell:>{width}}" for cell, (_, width) in zip(_cells(row), heads, strict=True))
                )
    if not quiet.may_claim:
        print(f"# times and ratios not claimed: {quiet.refusal()}")


def _cells(row: Row) -> list[str]:
    def number(name: str, form: str, missing: str = "-") -> str:
        return format(row.median(name), form) if name in row.figures else missing

    def difference(name: str) -> str:
        ends = " to ".join(number(f"{name}_{end}", "+.3f", "?") for end in ("low", "high"))
        return f"{number(name, '+.3f')} ({ends})" if name in row.figures else "-"

    return [
        number("loss", ".4f", "diverged" if "diverged_seeds" in row.figures else "-"),
        difference("loss_difference"),
        number("accuracy_percent", ".1f"),
        difference("accuracy_difference"),
        number("step_ms", ".1f"),
        number("step_kb", ".1f"),
        *(number(f"{name}_ms", ".2f") for name in ("encode", "decode", "wire")),
        number("total_s", ".1f"),
        number("to_loss_s", ".1f", "never" if "loss" in row.figures else "-"),
        number("faster_than_ddp", ".2f"),
    ]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("loss", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/loss.json")
    tasks = tuple(TASKS)
    parser.add_argument(
        "--task", type=harness.choice(tasks), default=list(tasks), help=f"comma list: {', '.join(tasks)}"
    )
    parser.add_argument(
        "--arm", action="append", choices=ARMS, help="besides those that send fp32; may be repeated (default: all)"
    )
    parser.add_argument(
        "--links", default="100mbit", help=f"rates as tc writes them, or {UNLIMITED}; with commas (default 100mbit)"
    )
    parser.add_argument("--hosts", type=int, default=2, help="(default 2)")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="(default 2)")
    parser.add_argument("--seeds", type=int, help="(default 5; with --quick 2); 0: only times of steps")
    parser.add_argument("--steps", type=int, help="of each run (default 600; with --quick 24)")
    parser.add_argument("--timed-steps", type=int, help="on the limited link (default 30; with --quick 6)")
    parser.add_argument("--timeout", type=float, default=36000, help="seconds for one group of runs (default 36000)")
    parser.add_argument("--end-to-end", action="store_true", help="train on the limited link, at its pace")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="appends what each run gave, and goes on from there where it was cut"
    )
    parser.add_argument("--quick", action="store_true", help="few seeds and steps: shows that it works, no more")
    parser.add_argument("--as-rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, whole, quick in (("seeds", 5, 2), ("steps", 600, 24), ("timed_steps", 30, 6)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    for name, least in (("hosts", 1), ("ranks_per_host", 1), ("seeds", 0), ("steps", 1), ("timed_steps", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.end_to_end and not options.seeds:
        parser.error("--end-to-end trains to the end: it needs --seeds of at least 1")
    if options.plot and not options.seeds:
        parser.error("--plot draws losses: it needs --seeds of at least 1")
    options.links = options.links.split(",")
    if harness.is_a_rank() and not options.as_rank_of:
        parser.error("this suite starts its own ranks: run it without torchrun, with --hosts and --ranks-per-host")
    return options
