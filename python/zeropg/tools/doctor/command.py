"""`python -m zeropg doctor`: runs the checks and prints their findings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from zeropg.tools import machine
from zeropg.tools.command_line import make_parser
from zeropg.tools.doctor import gpu, installation, network, node, self_test, storage
from zeropg.tools.doctor.finding import Finding

_DESCRIPTION = """
Shows what zeropg was built with, what this machine lets it use, and why not. Each line begins with

  ok    as it should be
  warn  works, but worse than it could or than one may expect
  no    not available; the reason follows, and after -> what to do

It leaves nothing changed: it writes one block at --path and removes it, and starts two ranks that sum a tensor.
"""
_EXAMPLES = """
examples:
  python -m zeropg doctor                             this machine, for as many ranks as it has CPUs
  python -m zeropg doctor --ranks 8 --path /mnt/nvme  eight ranks; offload and checkpoints on that disk
  python -m zeropg doctor --json                      for a program, or to attach to a report

status: 0 two ranks summed correctly; 1 they did not; 2 wrong options
"""


def main(arguments: list[str]) -> int:
    """Check as `arguments` say; returns the exit status."""
    options = _parse(arguments)
    if options.self_test_rank is not None:
        return self_test.run_rank(options.self_test_rank, options.store)
    findings = []
    for section, finding in _findings(options):
        findings.append((section, finding))
        if not options.json:
            if len(findings) == 1 or findings[-2][0] != section:
                print(f"\n{section}")
            print(finding, flush=True)
    failed = any(finding.topic == "self-test" and finding.state == "no" for _, finding in findings)
    if options.json:
        entries = [{"section": section, **finding.as_dict()} for section, finding in findings]
        print(json.dumps({"machine": machine.describe(), "findings": entries}, indent=2))
    return int(failed)


def _findings(options: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    sections = (
        ("installation", installation.check),
        ("this node", lambda: node.check(options.ranks)),
        ("storage", lambda: storage.check(options.path)),
        ("GPU", gpu.check),
        ("between nodes", network.check),
    )
    for name, check in sections:
        for finding in check():
            yield name, finding
    if not options.no_self_test:
        yield "self-test", self_test.check()


def _parse(arguments: list[str]) -> argparse.Namespace:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", max(1, int(machine.usable_cpus()))))
    parser = make_parser("doctor", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "-n", "--ranks", type=int, default=ranks, help="ranks that will run on this machine (default here: %(default)s)"
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=Path(),
        help="folder for checkpoints and offloaded state (default: the current one)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--no-self-test", action="store_true", help="do not start the two ranks")
    parser.add_argument("--self-test-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks} is not positive")
    options.path = options.path.resolve()
    return options
