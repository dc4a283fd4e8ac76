"""What of LangChain's suites is run and what is left out: asserted, and printed, also where workers run it: they load
what lies deeper, and who adds up does not."""

from __future__ import annotations

from collections import Counter

import pytest

SUITES = "integrations/langchain/tests/test_standard.py"
LEFT_OUT = frozenset(
    {
        "test_audio_inputs",
        "test_image_inputs",
        "test_image_tool_message",
        "test_pdf_inputs",
        "test_pdf_tool_message",
        "test_stream_time",  # records what goes over a network, and nothing does
    }
)
"""What the suites skip: what is no text, and a recording."""


_COUNTS: dict[str, Counter[str]] = {}
_SKIPPED: dict[str, set[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.nodeid.startswith(SUITES) or not (report.when == "call" or report.skipped or report.failed):
        return
    _, suite, test = report.nodeid.split("::")
    _COUNTS.setdefault(suite, Counter())[report.outcome] += 1
    if report.skipped:
        _SKIPPED.setdefault(suite, set()).add(test.partition("[")[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _wrong() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for suite, counts in _COUNTS.items():
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.write_line(f"langchain-tests, {suite}: {said}")
    for wrong in _wrong():
        terminalreporter.write_line(f"langchain-tests, {wrong}", red=True)


def _wrong() -> list[str]:
    """What is skipped and must not be, and suites of which nothing is run."""
    more = [f"{suite}: skipped {sorted(left - LEFT_OUT)}" for suite, left in _SKIPPED.items() if left - LEFT_OUT]
    return more + [f"{suite}: nothing has passed" for suite, counts in _COUNTS.items() if not counts["passed"]]
