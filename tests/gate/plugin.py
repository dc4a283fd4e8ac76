"""Lanes of tests, their determinism, and their skips: what `make test` asks of pytest beyond running it.

A test is in one lane. `--lane` runs one of them, and deselects the others':

- **gate**: all tests that no list names. They must not depend on time or on other processes: a test that sleeps, reads
  a clock, opens a port, starts a process or kills one fails, unless `timing.toml` lists it.
- **timing**: the tests of `timing.toml`, which gate too, one at a time.
- **nightly**: the tests of `nightly.toml`, and those that are marked `slow`.

Without `--lane` tests run as they are named, and nothing is forbidden. In what gates, a skip that `skips.toml` does not
list is an error. Each list maps files, folders or tests to the reason; an entry that names nothing is an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from choreo_agents.models import loader

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
LANES = ("gate", "timing", "nightly")
DURATIONS = TESTS / "durations.json"
"""Seconds of the tests that take long, by id: these begin first, so that none is left over at the end."""


_ALWAYS: dict[str, Any] = {"deadline": None, "stateful_step_count": 30, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("gate", max_examples=25, derandomize=True, database=None, **_ALWAYS)
"""What gates a change draws the same examples every time."""
settings.register_profile(
    "nightly", max_examples=100, print_blob=True, database=DirectoryBasedExampleDatabase("build/hypothesis"), **_ALWAYS
)
"""What does not gate draws new examples, and first those that have failed before: `--hypothesis-profile nightly`."""
settings.load_profile("gate")


@cache
def read_list(name: str, field: str = "reason") -> dict[str, Any]:
    """Read `tests/NAME.toml`: reasons, or another field, by test, file or folder, from the root as pytest has them."""
    entries: dict[str, Any] = {}
    for entry in tomllib.loads((TESTS / f"{name}.toml").read_text())[name]:
        for test in entry["tests"]:
            if test in entries:
                raise pytest.UsageError(f"tests/{name}.toml names {test!r} twice")
            entries[test] = entry.get(field)
    return entries


def names_of(node_id: str) -> Iterator[str]:
    """Yield what a list may call a test: its id, the same without parameters, its file, and the folders around it."""
    yield node_id
    file, _, test = node_id.partition("::")
    if "[" in test:
        yield f"{file}::{test.partition('[')[0]}"
    yield file
    yield from (each.as_posix() for each in Path(file).parents)


def reason_in(entries: Mapping[str, Any], node_id: str) -> Any:
    """Find what a list says of a test; None if it does not name it."""
    return next((entries[name] for name in names_of(node_id) if name in entries), None)


def lane_of(item: pytest.Item, timing: Mapping[str, str], nightly: Mapping[str, str]) -> str:
    """Tell the one lane of a test."""
    if item.get_closest_marker("slow") is not None or reason_in(nightly, item.nodeid) is not None:
        return "nightly"
    return "timing" if reason_in(timing, item.nodeid) is not None else "gate"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, help="run this lane alone, by its rules (default: what is named, freely)")
    parser.addoption("--report", type=Path, help="write outcomes and seconds of all tests to this file, as JSON lines")
    parser.addoption("--threads", type=int, default=1, help="that torch computes with (default: 1)")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))
    # What tests compare with is computed on the CPU: a GPU is for those that name it.
    loader.usual_device = lambda: "cpu"
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporting(config), "gate-reporting")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files alone that only nightly runs: they may need packages that are not installed."""
    if config.getoption("--lane") in (None, "nightly") or not collection_path.is_relative_to(ROOT):
        return None
    nightly = read_list("nightly")
    return True if collection_path.relative_to(ROOT).as_posix() in nightly else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the lane, and begin with the files that take longest."""
    lane = config.getoption("--lane")
    if lane is None:
        return
    timing, nightly = read_list("timing"), read_list("nightly")
    by_lane: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_lane[lane_of(item, timing, nightly)].append(item)
    config.hook.pytest_deselected(items=[item for other in LANES if other != lane for item in by_lane[other]])
    items[:] = in_order(by_lane[lane])


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sort tests so that two workers end together: files stay whole, and in each half of the list long ones come first.

    Workers begin with one half of the list each, and take over from the end of the other's.
    """
    seconds: Mapping[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    longest_first = sorted(files, key=lambda file: -sum(seconds.get(item.nodeid, 0.0) for item in files[file]))
    return [item for half in (longest_first[::2], longest_first[1::2]) for file in half for item in files[file]]


class Reporting:
    """Prints failures when they happen, writes the report, and makes a skip that no list explains a failure."""

    def __init__(self, config: pytest.Config) -> None:
        self._gates = config.getoption("--lane") in ("gate", "timing")
        self._report: Path | None = config.getoption("--report")
        self._config = config
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._unlisted: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note files that cannot be imported, or are skipped as a whole; those that can have tests to report."""
        if report.failed or report.skipped:
            self._note(report, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report, report.duration)

    def _note(self, report: pytest.TestReport | pytest.CollectReport, seconds: float) -> None:
        row = self._outcomes.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + seconds, 3)
        if report.failed:
            row["outcome"] = "failed"
            self._print_at_once(report)
        elif report.skipped and not hasattr(report, "wasxfail"):
            listed = not self._gates or reason_in(read_list("skips"), report.nodeid) is not None
            row["outcome"] = "skipped" if listed else "failed"
            if not listed:
                self._unlisted.append(report.nodeid)

    def _print_at_once(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.section(f"{report.nodeid} ({getattr(report, 'when', 'import')})", sep="-", red=True)
        terminal.write_line(report.longreprtext)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._report is not None:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            self._report.write_text("".join(json.dumps(row) + "\n" for row in self._outcomes.values()))
        if self._unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what tests have counted (`record_property("counts", ...)`), and which skips are failures."""
        for report in terminalreporter.getreports("passed"):
            for name, value in report.user_properties:
                if name == "counts" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
        for test in self._unlisted:
            terminalreporter.write_line(f"SKIPPED without an entry in tests/skips.toml: {test}", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test of the gate does that depends on time or on other processes."""
    if item.config.getoption("--lane") != "gate":
        return (yield)
    with noted() as found:
        item.stash[_FOUND] = found
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail such a test, when all that belongs to it has ended well."""
    yield
    if found := item.stash.get(_FOUND, None):
        uses = "\n".join(sorted(found))
        found.clear()
        pytest.fail(f"depends on time or processes: wait for an event, or see tests/timing.toml:\n{uses}", False)


_FOUND: pytest.StashKey[set[str]] = pytest.StashKey()
_CLOCKS = (
    "time",
    "monotonic",
    "perf_counter",
    "process_time",
    "thread_time",
    "time_ns",
    "monotonic_ns",
    "perf_counter_ns",
)


@contextmanager
def noted() -> Iterator[set[str]]:
    """Note sleeps and clocks that files of tests call, and ports, processes and kills, whoever asks for them."""
    found: set[str] = set()

    def watched(owner: Any, name: str, what: str, *, by_tests: bool = False, waits: bool = False) -> Any:
        real = getattr(owner, name)

        @wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            place = place_of_call(sys._getframe(1), at_once=by_tests)
            if not by_tests and place is None:
                place = "a thread of another package's"
            if place is not None and not (waits and args and args[0] <= 0):
                found.add(f"{what} at {place}")
            return real(*args, **options)

        return mock.patch.object(owner, name, call)

    with ExitStack() as stack:
        for clock in _CLOCKS:
            stack.enter_context(watched(time, clock, f"time.{clock}", by_tests=True))
        stack.enter_context(watched(time, "sleep", "time.sleep", by_tests=True, waits=True))
        stack.enter_context(watched(asyncio, "sleep", "asyncio.sleep", by_tests=True, waits=True))
        stack.enter_context(watched(socket.socket, "bind", "a port"))
        stack.enter_context(watched(subprocess.Popen, "__init__", "a process"))
        stack.enter_context(watched(BaseProcess, "start", "a process"))
        stack.enter_context(watched(os, "kill", "os.kill"))
        stack.enter_context(watched(os, "fork", "os.fork"))
        yield found


def place_of_call(frame: FrameType | None, *, at_once: bool) -> str | None:
    """Find the file and line of ours that calls; with `at_once` only if the caller itself is a file of tests."""
    while frame is not None:
        shown = path_of_ours(frame.f_code.co_filename)
        if at_once and (shown is None or "tests" not in Path(shown).parts):
            return None
        if shown is not None:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@cache
def path_of_ours(filename: str) -> str | None:
    """Shorten the name of a file of the project's; None for any other, and for this one."""
    path = Path(filename)
    if not path.is_relative_to(ROOT) or ".venv" in path.parts or path == Path(__file__):
        return None
    return path.relative_to(ROOT).as_posix()
