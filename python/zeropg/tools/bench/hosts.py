"""Ranks of a suite on simulated hosts, and the bytes that such a host sends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zeropg.tools.lab.lab import Lab

UNLIMITED = "unlimited"
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of the host of a lab


def sent_bytes() -> float:
    """What this host's interface has sent so far, headers and acknowledgements included; 0 outside of a lab."""
    return float(_SENT.read_text()) if _SENT.exists() else 0.0


def start_on_hosts(
    arguments: Sequence[str], *, hosts: int, ranks_per_host: int, link: str | None, timeout: float
) -> bool:
    """Runs `python -m zeropg ARGUMENTS` on every rank; prints what failed ranks said. Returns whether all succeeded.

    link: the rate of each host's link in each direction, as tc writes it; UNLIMITED or None: no limit.
    """
    with Lab(hosts=hosts, rate=None if link == UNLIMITED else link) as lab:
        launched = lab.torchrun("-m", "zeropg", *arguments, nproc_per_node=ranks_per_host)
        failed = [host.stdout + host.stderr for host in launched.wait(timeout=timeout) if host.returncode != 0]
    if failed:
        print("\n".join(text[-4000:] for text in failed), file=sys.stderr)
    return not failed
