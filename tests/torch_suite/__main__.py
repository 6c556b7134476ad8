"""Runs torch's own backend suite over zeropg.

    python -m tests.torch_suite                     every test; exit code 1 if expectations.py says otherwise
    python -m tests.torch_suite --impersonate gloo  zeropg under gloo's name: the tests that torch keeps for gloo too
    python -m tests.torch_suite test_all_reduce_sum test_barrier
    python -m tests.torch_suite --serve             names on stdin, a line of JSON per test on stdout (test_slice.py)

--backend gloo runs the same tests on gloo itself, which is how expectations.py was made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import unittest
from typing import Any

from tests.torch_suite import expectations


def run_one(name: str) -> dict[str, Any]:
    """Runs one test; returns {"name", "outcome": passed | failed | skipped, "seconds", "text"}."""
    from tests.torch_suite.cases import TestBackend

    start = time.monotonic()
    try:
        case = TestBackend(name)
    except ValueError:
        return {"name": name, "outcome": "failed", "seconds": 0.0, "text": "this version of torch has no such test"}
    result = unittest.TestResult()
    try:
        case.run(result)
    except BaseException:  # a name that unittest knows and the suite's own machinery stumbles over
        result.errors.append((case, traceback.format_exc()))
    bad = result.failures + result.errors
    outcome = "failed" if bad else "skipped" if result.skipped else "passed"
    text = "\n".join(text for _, text in bad) or "; ".join(reason for _, reason in result.skipped)
    return {"name": name, "outcome": outcome, "seconds": round(time.monotonic() - start, 1), "text": text}


def serve() -> None:
    out = os.fdopen(os.dup(1), "w")  # the suite's ranks write to 1 themselves
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run_one(line.strip())), file=out, flush=True)


def run_all(names: list[str], is_gloo_kept: bool) -> int:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    surprises = []
    start = time.monotonic()
    for name in names:
        result = run_one(name)
        counts[result["outcome"]] += 1
        if result["outcome"] != "skipped":
            print(f"{result['outcome']:8} {result['seconds']:6.1f} s  {name}", flush=True)
        reason = expectations.FAILING.get(name)
        if result["outcome"] == "failed" and reason is None:
            surprises.append(f"{name} failed\n{result['text']}")
        elif result["outcome"] == "passed" and reason is not None:
            surprises.append(f"{name} passed, expected a failure ({reason}): take it out of expectations.py")
        elif (
            result["outcome"] == "skipped"
            and name in expectations.PASSES_ON_GLOO
            and (is_gloo_kept or name not in expectations.KEPT_FOR_GLOO)
        ):
            surprises.append(f"{name} was skipped, but gloo passes it: {result['text']}")
    print(", ".join(f"{number} {what}" for what, number in counts.items()), f"in {time.monotonic() - start:.0f} s")
    for surprise in surprises:
        print(f"\n--- {surprise}")
    return 1 if surprises else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tests to run (default: all)")
    parser.add_argument("--backend", default="zeropg")
    parser.add_argument("--impersonate", metavar="NAME", help="register zeropg under this name and use it")
    parser.add_argument("--world-size", default="2")
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    os.environ["BACKEND"] = arguments.impersonate or arguments.backend
    os.environ["IMPERSONATE"] = "1" if arguments.impersonate else "0"
    os.environ["WORLD_SIZE"] = arguments.world_size
    from tests.torch_suite import cases

    if arguments.serve:
        serve()
        return 0
    names = arguments.names or unittest.defaultTestLoader.getTestCaseNames(cases.TestBackend)
    return run_all(list(names), is_gloo_kept=cases.BACKEND == "gloo")


if __name__ == "__main__":
    sys.exit(main())
