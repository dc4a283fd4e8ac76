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
    """Every engine that is made while it is in use, by whomever. They are checked and closed at its end."""
    made: list[Engine] = []
    begin = Engine.__init__

    def begun(self: Engine, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", begun)
    with ExitStack() as closing:
        yield made
        for engine in made:
            closing.callback(engine.close)
        for engine in made:
            engine.check()


@pytest.fixture
def no_leases_left(checked_engines: list[Engine]) -> Iterator[None]:
    """Fails a test at whose end a tenant of one of its engines holds a lease: of what was kept and not released."""
    yield
    for engine in checked_engines:
        with suppress(EngineClosedError):  # a tenancy that was closed holds none
            held = {author: held.leases for author, held in engine.kv.memory_map().authors.items()}
            assert not held, f"leases are left behind, by authors of messages: {held}"
