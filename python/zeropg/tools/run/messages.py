"""What the launcher and the process on each host tell each other: a line of JSON each, over the pipes of ssh.

launcher -> host  one Plan, and then an empty line every BEAT_SECONDS: when the pipe ends, or nothing comes for as long
                  as the plan says, the host stops its ranks
host -> launcher  Hello, then Output again and again, then Failed or Done
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

BEAT_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """What one host runs.

    first_rank: the global rank of its local rank 0. master_port: 0: this is the only host, and any port will do.
    command: for torchrun, after its own options: a script, or `-m` and a module, or `--no-python` and a program.
    slots: which of the GPUs that the host may use: numbers into its CUDA_VISIBLE_DEVICES; None: all as they are.
    cpus: whether ranks are bound to cores: None: no; "": to all there are; else to those of this list, "0-3,8".
    silence: seconds without a word from the launcher after which it is lost, and the network with it; 0: forever.
    passes_local_rank: whether each rank gets its number on the host as an argument, --local_rank=N, before the others.
    """

    node_rank: int
    nodes: int
    first_rank: int
    ranks: int
    address: str
    master_addr: str
    master_port: int
    command: list[str]
    environment: dict[str, str]
    slots: list[int] | None
    cpus: str | None
    silence: float
    passes_local_rank: bool = False


@dataclass(frozen=True)
class Hello:
    """address: at which others reach this host; "" where it does not know. is_sure: whether ssh came in at it.
    launcher: at which this host sees the launcher's; "" where it does not know. is_beside_launcher: ssh came in from
    the host itself. versions: of what must be alike on all hosts, by name. clock: seconds since the epoch.
    """

    address: str
    versions: dict[str, str]
    clock: float
    is_sure: bool = False
    launcher: str = ""
    is_beside_launcher: bool = False


@dataclass(frozen=True)
class Output:
    """What a rank has written, to standard output or to standard error."""

    rank: int
    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Failed:
    """rank: None where no rank was the reason. exit_code: negative: a signal. since: when it wrote its last words."""

    rank: int | None
    exit_code: int
    since: float
    why: str


@dataclass(frozen=True)
class Done:
    """All ranks of the host ended well."""


Message = Hello | Output | Failed | Done
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Plan, Hello, Output, Failed, Done)}


def to_line(message: Plan | Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def from_line(line: bytes) -> Any:
    """Raises ValueError where it is no message."""
    try:
        name, fields = json.loads(line)
        return _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{line[:200]!r} is no message of zeropg run") from error
