"""Runs tests of the engine's facade on remote engines: `pytest -p remote_support.plugin --engine loopback`.

`loopback` has two engines in the process of the tests, `ray` two actors. What cannot hold there is left out; with
`--listed` that alone is run, and must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from remote_support.actors import actors
from remote_support.loopback import load_loopback
from remote_support.unsupported import mark_listed

from choreo_agents import Engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=["loopback", "ray"], required=True, help="what `make_engine` makes")
    parser.addoption("--listed", action="store_true", help="run what unsupported.toml lists, which must fail")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot hold for remote engines, or all else."""
    mark_listed(items, config.getoption("--engine"), failing=config.getoption("--listed"))


@pytest.fixture(scope="session")
def load_remote(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """What takes the arguments of `Engine.load`, and loads remote engines."""
    if request.config.getoption("--engine") == "loopback":
        yield with_kv(load_loopback)
        return
    base = tmp_path_factory.getbasetemp()
    with actors(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) as load:
        yield with_kv(load)


def with_kv(load: Callable[..., Engine]) -> Callable[..., Engine]:
    """The same, which skips tests of engines that keep text only."""

    def loaded(*args: Any, **options: Any) -> Engine:
        if options.get("method", "choreo") != "choreo":
            pytest.skip("what keeps text only has nothing that others could use")
        return load(*args, **options)

    return loaded
