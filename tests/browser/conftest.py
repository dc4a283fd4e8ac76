"""The browser, once for all tests of pages; and pages of real runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browsers import IS_ASKED_FOR, chromium
from support.runs_to_look_at import RUNS, Looked


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not IS_ASKED_FOR:  # its event loop runs as long as the browser does, and tests beside it need one of their own
        pytest.skip("make test-browser runs it")
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Looked]:
    """Recordings of a debate, of a tree, of a graph with tools, and of that one's fork, each with its page."""
    folder = tmp_path_factory.mktemp("runs")
    made: dict[str, Looked] = {}
    for name, make in RUNS.items():
        made[name] = make(Path(folder), made)
    return made
