"""Options of the command `deepspeed` that have no other place: renamed, without a job to do here, or refused."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from zeropg.tools.run.launchers import LAUNCHERS

_PID_FOLDER = Path("/tmp")  # where scripts for DeepSpeed look
_BY_MPI = (
    "MPI's launchers start ranks by daemons of their own; zeropg needs none: use ssh, which is the default, or slurm "
    "in an allocation"
)
# Launchers of DeepSpeed's: what to use instead, or the name here.
_OTHER_LAUNCHERS = {"openmpi": _BY_MPI, "mpich": _BY_MPI, "impi": _BY_MPI, "mvapich": _BY_MPI}
_SAME_LAUNCHER = {"pdsh": "ssh"}  # which is what pdsh runs; here all hosts are reached at once, too
_NODES_THAT_COME = (
    "hosts do not come and go during a run; use torchrun --nnodes=MIN:MAX, and load the last checkpoint, which fits "
    "any world size"
)
_ONE_BY_ONE = (
    "this command starts all hosts; to start each by hand use torchrun --nnodes N --node-rank I --nproc-per-node K "
    "--master-addr ADDRESS there"
)
_REFUSED = {
    "--autotuning": "python -m zeropg tune PROGRAM does that, and writes the JSON that won",
    "--elastic_training": _NODES_THAT_COME,
    "--min_elastic_nodes": _NODES_THAT_COME,
    "--max_elastic_nodes": _NODES_THAT_COME,
    "--launcher_args": 'say them in --rsh "ssh ARGS", or in the variables of srun (SRUN_..., SLURM_...)',
    "--no_ssh": _ONE_BY_ONE,
    "--node_rank": _ONE_BY_ONE,
    "--venv_script": "ranks run under the Python that runs this command, at the same path on all hosts: start it by "
    "that environment's python",
}


def add_deepspeeds(parser: argparse.ArgumentParser) -> None:
    """Adds them; those that are refused are not in the help, but say why."""
    group = parser.add_argument_group("of the command deepspeed")
    group.add_argument(
        "--save_pid",
        action="store_true",
        help="meanwhile /tmp/PID.deepspeed names the process that stops the run at SIGTERM: this one, whose PID it is",
    )
    group.add_argument(
        "--force_multi", action="store_true", help="reach the hosts by ssh also where this machine is the only one"
    )
    group.add_argument(
        "--no_ssh_check",
        action="store_true",
        help="without effect: no check is made but that all hosts answer, since nothing starts before",
    )
    levels = ("debug", "info", "warning", "error", "critical")
    quiet = "without effect: nothing but failures is said, beside what ranks write"
    group.add_argument("--log_level", choices=levels, metavar="LEVEL", help=quiet)
    group.add_argument("-q", "--quiet", action="store_true", help=quiet)
    for option in _REFUSED:
        group.add_argument(option, action=_Refused, nargs="?", help=argparse.SUPPRESS)


def launcher_of(name: str) -> str:
    """The launcher that a name means, whatever its case. Raises ArgumentTypeError for others of DeepSpeed's."""
    known = _SAME_LAUNCHER.get(name.lower(), name.lower())
    if known in _OTHER_LAUNCHERS:
        raise argparse.ArgumentTypeError(f"{name}: {_OTHER_LAUNCHERS[known]}")
    if known not in LAUNCHERS:
        raise argparse.ArgumentTypeError(f"{name!r}; expected one of {', '.join((*LAUNCHERS, *_SAME_LAUNCHER))}")
    return known


def log_folder(name: str) -> Path | None:
    """A folder; "None" is none, which is DeepSpeed's default for --enable_each_rank_log."""
    return None if name == "None" else Path(name)


@contextmanager
def saved_pid(is_wanted: bool) -> Iterator[None]:
    """Meanwhile a file of DeepSpeed's name has the number of this process. Raises OSError where there is one already,
    somebody else's maybe."""
    if not is_wanted:
        yield
        return
    path = _PID_FOLDER / f"{os.getpid()}.deepspeed"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is not available: {_REFUSED[str(option_string)]}")
