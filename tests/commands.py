"""`python -m zeropg` in forked ranks: neither torchrun nor a rank loads torch anew, which takes most of the time."""

from __future__ import annotations

import io
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout

from tests.spawn import run_ranks
from zeropg import __main__ as program

AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as under torchrun: rank 0 does not have the store
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def run_forked(*arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    """What rank 0 says, and the status of all. ranks: as under torchrun; None: one process, as without it."""
    done = run_ranks(ranks or 1, _main, arguments, ranks is None, backend=None, env=AGENT_STORE, timeout=150)
    assert len({rank.returncode for rank in done}) == 1, done
    first: subprocess.CompletedProcess[str] = done[0]
    return first


def _main(arguments: tuple[str, ...], is_alone: bool) -> subprocess.CompletedProcess[str]:
    for name in _VARIABLES if is_alone else ():
        del os.environ[name]
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
        status = program.main([*arguments])
    return subprocess.CompletedProcess(arguments, status, said.getvalue(), errors.getvalue())
