"""Fixtures for pytest: `pytest_plugins = ["choreo_agents.testing.plugin"]` in a `conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from choreo_agents.engine import Engine
from choreo_agents.errors import EngineClosedError


@pytest.fixture
def checked_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """Yield the list of engines created during a test; at its end, check and close them all."""
    engines: list[Engine] = []
    begin = Engine.__init__

    def record(self: Engine, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        engines.append(self)

    monkeypatch.setattr(Engine, "__init__", record)
    with ExitStack() as closing:
        yield engines
        for engine in engines:
            closing.callback(engine.close)
        for engine in engines:
            engine.check()


@pytest.fixture
def no_leases_left(checked_engines: list[Engine]) -> Iterator[None]:
    """Fail a test that leaves a tenant of one of its engines with a lease."""
    yield
    for engine in checked_engines:
        with suppress(EngineClosedError):  # a closed tenancy holds none
            leases = {author: usage.leases for author, usage in engine.kv.memory_map().authors.items()}
            assert not leases, f"leases are left over, by authors of messages: {leases}"
