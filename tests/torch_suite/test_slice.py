"""torch's own suite for backends as pytest items: every test that gloo passes with two ranks, under our own name and,
for what torch keeps for gloo, under gloo's. See __main__.py for all of it and for running single ones by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
import torch

from tests.torch_suite.expectations import FAILING, KEPT_FOR_GLOO, PASSES_ON_GLOO

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 200
# On torch 2.11 gloo is no plugin whose name could be taken.
CAN_IMPERSONATE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


class Suite:
    """The process that runs tests by name; started anew after a test that does not end."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "tests.torch_suite", "--serve", *arguments]
        self._process: subprocess.Popen[str] | None = None
        self._answers: Queue[str] = Queue()

    def run(self, name: str) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=TIMEOUT_SECONDS)
        except Empty:
            answer = ""
        if not answer:
            self.close()
            return {"outcome": "failed", "text": f"the suite's process died or gave no answer in {TIMEOUT_SECONDS} s"}
        return dict(json.loads(answer))

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        answers: Queue[str] = Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()
        self._process, self._answers = process, answers

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)  # its ranks too
            self._process.wait()
        self._process.stdout.close()
        self._process = None


@pytest.fixture(scope="module")
def suite() -> Iterator[Callable[..., Suite]]:
    suites: dict[tuple[str, ...], Suite] = {}

    def get(*arguments: str) -> Suite:
        return suites.setdefault(arguments, Suite(*arguments))

    yield get
    for one in suites.values():
        one.close()


def check(result: dict[str, Any]) -> None:
    assert result["outcome"] == "passed", f"{result['outcome']}: {result['text']}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PASSES_ON_GLOO - KEPT_FOR_GLOO - FAILING.keys()))
def test_own_name(suite: Callable[..., Suite], name: str) -> None:
    check(suite().run(name))


@pytest.mark.slow
@pytest.mark.skipif(not CAN_IMPERSONATE, reason="torch 2.11 has gloo built in under its name")
@pytest.mark.parametrize("name", sorted(KEPT_FOR_GLOO))
def test_as_gloo(suite: Callable[..., Suite], name: str) -> None:
    check(suite("--impersonate", "gloo").run(name))
