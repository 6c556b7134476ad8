"""The turn of each test, and a second one for tests that time decides.

Other programs, too, may use the machine. A test marked `alone` or `timed` that fails runs once more, while no other
test does. Where it passes then, the closing line counts it as `retried`, and what it said at first stands above; one
that fails twice has failed.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

from tests.turns import turn

_FIRST = "failed at first"


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    is_alone = item.get_closest_marker("alone") is not None
    with turn(alone=is_alone):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failures = [report for report in reports if report.failed]
    if failures and (is_alone or item.get_closest_marker("timed")):
        item._initrequest()  # type: ignore[attr-defined]  # its fixtures are made again
        with turn(alone=True):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            report.user_properties.append((_FIRST, failures[0].longreprtext))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    is_retried = report.when == "call" and report.passed and _first_failure(report)
    return ("retried", "R", "RETRIED") if is_retried else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("retried"):
        terminalreporter.section(f"{report.nodeid} failed at first, and passed then")
        terminalreporter.write_line(_first_failure(report))


def _first_failure(report: pytest.TestReport) -> str:
    return str(dict(report.user_properties).get(_FIRST, ""))
