"""`python -m zeropg run`: starts a program on all ranks of one or several hosts, and ends it everywhere at once."""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from zeropg.tools.command_line import make_parser
from zeropg.tools.run.cores import parse_cpu_list
from zeropg.tools.run.deepspeeds_options import add_deepspeeds, launcher_of, log_folder, saved_pid
from zeropg.tools.run.environment import environment_files, of_launchers, read_environment_files, to_pass
from zeropg.tools.run.hosts import Host, first, read_hostfile, select
from zeropg.tools.run.job import Failure, Job, Node, Stopped, Unreachable, say
from zeropg.tools.run.launchers import LAUNCHERS, address_of_name, choose, slurm_hosts
from zeropg.tools.run.messages import Plan
from zeropg.tools.run.rank_output import RankOutput
from zeropg.tools.run.record import NAME, RankFailure, Record, write_record

_DEEPSPEEDS_HOSTFILE = Path("/job/hostfile")
_PORT = 29500
_ALL = -1  # what DeepSpeed's counts are by default
_SILENCE_SECONDS = 60.0  # of a launcher that is lost: as long as ssh tries, and a little more

_DESCRIPTION = """
Starts a program on all ranks of one or several hosts, as the command `deepspeed` does: torchrun on each host, reached
by ssh, or by srun in an allocation of slurm's. Hosts are checked before anything starts. What ranks write comes here,
each line with its rank: standard output to standard output, standard error to standard error. When a rank fails, when a
host is lost, or on Ctrl-C, all ranks of all hosts are stopped. So are those of other hosts when this command is lost to
them, or is stopped (Ctrl-Z), for a minute. Under nohup it goes on without its terminal.
"""
_EXAMPLES = """
a hostfile has a line for each host; a slot is a rank, and on a host with GPUs the number of a GPU, or its place in the
CUDA_VISIBLE_DEVICES that a scheduler has set there:
  worker-0 slots=4      # a comment
  worker-1 slots=4
  me@worker-2:2222 slots=4      # which is worker-2 in --include; ssh's own configuration counts, too

what the other hosts need: this Python and zeropg at the same path, and the script in the same folder. The variables
ZEROPG_*, NCCL_*, GLOO_*, UCX_*, TORCH*, PYTHON*, OMP_*, MKL_*, HF_*, MLFLOW*, PATH and LD_LIBRARY_PATH are passed on;
lines NAME=VALUE in .deepspeed_env, at home or here, add others.

examples:
  python -m zeropg run --num_gpus 2 train.py --deepspeed_config ds.json      two ranks on this machine
  python -m zeropg run --hostfile hosts train.py                             all slots of all hosts
  python -m zeropg run --hostfile hosts --include worker-0@worker-1:0,2 train.py
  python -m zeropg run --hostfile hosts --exclude worker-1:3 --log_dir logs -m my.module
  python -m zeropg run --num_gpus 4 --bind_cores train.py                    each rank on cores of its own
  python -m zeropg run --num_gpus 2 --local_rank train.py                    for scripts that read args.local_rank
  python -m zeropg run --hostfile hosts --rsh "ssh -p 2222" train.py         another command to reach hosts

status: 0 all ranks ended well; 1 a rank failed, or a host cannot be reached; 2 wrong options; 130 Ctrl-C
"""


def main(arguments: list[str]) -> int:
    """Run as `arguments` say; returns the exit status."""
    options, parser = _parse(arguments)
    try:
        hosts = _hosts(options)
        launcher = choose(options.launcher, hosts, "SLURM_JOB_ID" in os.environ, options.rsh)
        environment = (to_pass(os.environ) if launcher != "local" else {}) | _from_files(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with ExitStack() as stack:
        try:
            stack.enter_context(saved_pid(options.save_pid))
        except OSError as error:
            parser.error(f"--save_pid: {error}")
        return _run(hosts, launcher, options, environment)


def _run(hosts: list[Host], launcher: str, options: argparse.Namespace, environment: dict[str, str]) -> int:
    record: Record | None = None
    try:
        start = LAUNCHERS[launcher].command
        own = dict(os.environ) if launcher == "local" else of_launchers(os.environ)
        with Job(hosts, lambda host: start(host, options.rsh, own), own) as job:
            job.reach(options.connect_timeout)
            plans = [_plan(job.nodes, index, launcher, options, environment) for index in range(len(hosts))]
            output = _open_output(hosts, options.log_dir)
            record = Record([host.name for host in hosts for _ in host.slots])
            _note(options.log_dir, record)
            failures = job.run(plans, output)
    except Unreachable as error:
        say(f"zeropg run: {error}; nothing is started")
        return 1
    except Stopped as stopped:
        if record is not None:
            _note(options.log_dir, replace(record, failures=[], stopped=str(stopped)))
        say(f"zeropg run: {stopped}: all ranks are stopped")
        return 128 + stopped.number
    for line in _report(failures, output):
        say(line)
    ends = [RankFailure(failure.rank, failure.node.host.name, _how(failure)) for failure in failures]
    _note(options.log_dir, replace(record, failures=ends))
    return 1 if failures else 0


def _open_output(hosts: list[Host], folder: Path | None) -> RankOutput:
    """Raises Unreachable where there can be no logs."""
    try:
        return RankOutput(sum(len(host.slots) for host in hosts), folder)
    except OSError as error:
        raise Unreachable(f"--log_dir: {error}") from None


def _note(folder: Path | None, record: Record) -> None:
    """For `python -m zeropg logs`, which does without it where the disk is full; an old one would mislead it."""
    if folder is None:
        return
    try:
        write_record(folder, record)
    except OSError:
        with suppress(OSError):
            (folder / NAME).unlink()


def _hosts(options: argparse.Namespace) -> list[Host]:
    """What is to be used. Raises ValueError with the reason why that cannot be, OSError where a file cannot be read."""
    counted = options.num_nodes is not None or options.num_gpus is not None
    filtered = bool(options.include or options.exclude)
    if counted and filtered:
        raise ValueError("--num_nodes and --num_gpus cannot be combined with --include and --exclude")
    hostfile = options.hostfile
    if hostfile is None and options.launcher in (None, "ssh") and _DEEPSPEEDS_HOSTFILE.is_file():
        hostfile = _DEEPSPEEDS_HOSTFILE
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
    elif options.launcher == "slurm" or (options.launcher is None and "SLURM_JOB_ID" in os.environ):
        hosts = slurm_hosts(os.environ, options.num_gpus)
    else:
        hosts = [Host("localhost", tuple(range(options.num_gpus or _gpus() or 1)))]
    hosts = select(hosts, options.include, options.exclude)
    if options.ssh_port is not None:
        hosts = [replace(host, port=host.port or options.ssh_port) for host in hosts]
    return first(hosts, options.num_nodes, options.num_gpus)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _from_files(options: argparse.Namespace) -> dict[str, str]:
    if options.environment_file is not None:
        return read_environment_files([options.environment_file])
    return read_environment_files(environment_files(os.environ))


def _plan(
    nodes: list[Node], index: int, launcher: str, options: argparse.Namespace, environment: dict[str, str]
) -> Plan:
    """Of one host. Raises Unreachable where the others would not know how to reach the first one."""
    node, leader = nodes[index], nodes[0]
    assert node.hello is not None and leader.hello is not None
    master = options.master_addr or address_of(leader, nodes, launcher)
    if len(nodes) > 1 and not master:
        raise Unreachable(f"{leader.host.name} does not know its own address; say it with --master_addr")
    command = ["--no-python"] if options.no_python else ["-m"] if options.module else []
    is_chosen = options.hostfile is not None or options.include or options.exclude
    return Plan(
        node_rank=index,
        nodes=len(nodes),
        first_rank=node.first_rank,
        ranks=len(node.host.slots),
        address=master if index == 0 else address_of(node, nodes, launcher),
        master_addr=master,
        master_port=options.master_port or (_PORT if len(nodes) > 1 or options.master_addr else 0),
        command=[*command, options.program, *options.arguments],
        environment=environment,
        slots=list(node.host.slots) if is_chosen else None,
        cpus=(options.bind_core_list or "") if options.bind_cores else None,
        silence=0.0 if launcher == "local" else _SILENCE_SECONDS,
        passes_local_rank=options.local_rank,
    )


def address_of(node: Node, nodes: list[Node], launcher: str) -> str:
    """At which the other hosts reach this one; "" where nobody knows.

    That is where ssh came in, unless the host is the launcher's own: then it is where others see the launcher. Slurm's
    nodes go by their names.
    """
    assert node.hello is not None
    if node.hello.is_sure or len(nodes) == 1:
        return node.hello.address
    if launcher == "slurm":
        return address_of_name(node.host.name) or node.hello.address
    seen = next((one.hello.launcher for one in nodes if one.hello is not None and one.hello.launcher), "")
    return (seen if node.hello.is_beside_launcher else "") or node.hello.address


def _report(failures: list[Failure], output: RankOutput) -> list[str]:
    """What is said at the end: which rank of which host failed first, and its last lines."""
    if not failures:
        return []
    cause, *others = failures
    lines = []
    if cause.rank is not None and output.tail(cause.rank):
        lines += [f"--- last lines of rank {cause.rank}:", *output.tail(cause.rank), "---"]
    elif cause.rank is None:
        lines += [f"--- last lines of {cause.node.host.name}:", *cause.node.said, "---"] if cause.node.said else []
    lines.append(f"zeropg run: {_what(cause)} failed first: {_how(cause)}; all ranks are stopped")
    lines += [f"  then {_what(other)}: {_how(other)}" for other in others]
    if cause.rank is not None and output.path(cause.rank) is not None:
        lines.append(f"  its log: {output.path(cause.rank)}")
    return lines


def _what(failure: Failure) -> str:
    host = failure.node.host.name
    return host if failure.rank is None else f"rank {failure.rank} on {host}"


def _how(failure: Failure) -> str:
    if failure.why:
        return failure.why
    if failure.exit_code >= 0:
        return f"exit code {failure.exit_code}"
    try:
        return f"killed by {signal.Signals(-failure.exit_code).name}"
    except ValueError:
        return f"killed by signal {-failure.exit_code}"


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = make_parser(
        "run", _DESCRIPTION, _EXAMPLES, usage="python -m zeropg run [options] PROGRAM [arguments of the program]"
    )
    _add_hosts(parser)
    _add_running(parser)
    add_deepspeeds(parser)
    options = parser.parse_args(arguments)
    if options.module and options.no_python:
        parser.error("--module and --no_python are both given; expected one of them")
    if options.bind_core_list is not None:
        options.bind_cores = True
        try:
            parse_cpu_list(options.bind_core_list)
        except ValueError as error:
            parser.error(f"--bind_core_list: {error}")
    if options.force_multi and "SLURM_JOB_ID" not in os.environ:
        options.launcher = options.launcher or "ssh"
    for name in ("num_nodes", "num_gpus"):
        if getattr(options, name) == _ALL:
            setattr(options, name, None)
    for name in ("num_nodes", "num_gpus", "connect_timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} is {value}, expected at least 1")
    return options, parser


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument(
        "-H", "--hostfile", type=Path, metavar="FILE", help="the hosts and their slots (default: /job/hostfile, if any)"
    )
    group.add_argument(
        "-i", "--include", default="", metavar="SPEC", help="use these alone: HOST or HOST:SLOT,SLOT, joined by @"
    )
    group.add_argument("-e", "--exclude", default="", metavar="SPEC", help="use all but these, written likewise")
    group.add_argument("--num_nodes", "--nnodes", type=int, metavar="N", help="use the first N hosts")
    group.add_argument(
        "--num_gpus",
        "--num_accelerators",
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks of each host: its first N slots (default: all; without a hostfile a rank per GPU, or one)",
    )
    group.add_argument(
        "--launcher",
        type=launcher_of,
        metavar="|".join(LAUNCHERS),
        help="; ".join(f"{name}: {one.does}" for name, one in LAUNCHERS.items())
        + "; pdsh is ssh (default: by the hosts)",
    )
    group.add_argument(
        "--rsh", default="", metavar="CMD", help="instead of ssh: is called with a host and a command for its shell"
    )
    group.add_argument(
        "--ssh_port",
        type=int,
        metavar="PORT",
        help="for ssh to hosts without a port in the hostfile (default: its own)",
    )
    group.add_argument(
        "--connect_timeout", type=float, default=120, metavar="S", help="seconds for all hosts to answer (default 120)"
    )
    group.add_argument("--master_addr", metavar="ADDR", help="where the ranks meet (default: the first host's address)")
    group.add_argument("--master_port", type=int, metavar="PORT", help=f"the port for that (default {_PORT})")


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument(
        "--bind_cores", "--bind_cores_to_rank", action="store_true", help="bind each rank to cores of its own"
    )
    group.add_argument("--bind_core_list", metavar="LIST", help="bind to these CPUs of each host alone: 0-15,32-47")
    group.add_argument(
        "--log_dir",
        "--enable_each_rank_log",
        type=log_folder,
        metavar="DIR",
        help="also write what each rank says to DIR/rank0.log ..., for zeropg logs",
    )
    group.add_argument(
        "--environment_file", type=Path, metavar="FILE", help="instead of .deepspeed_env: variables for all ranks"
    )
    passing = group.add_mutually_exclusive_group()
    passing.add_argument(
        "--local_rank",
        action="store_true",
        help="pass --local_rank=N to PROGRAM before its arguments, as the command deepspeed does",
    )
    passing.add_argument("--no_local_rank", action="store_false", dest="local_rank", help="do not (default)")
    group.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as with python -m")
    group.add_argument("--no_python", action="store_true", help="PROGRAM is no Python script, but runs by itself")
    parser.add_argument("program", metavar="PROGRAM", help="a script, which finds RANK, LOCAL_RANK and WORLD_SIZE")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
