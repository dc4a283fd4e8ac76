"""Tests of the engine's facade that are the product's, on two engines of this process: some files, since they gate.

`make test-elsewhere ENGINE=loopback` runs all files so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from remote_support.loopback import load_loopback
from remote_support.plugin import with_kv
from remote_support.unsupported import mark_listed

from choreo_agents import Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what cannot hold for remote engines."""
    here = Path(__file__).parent
    mark_listed([item for item in items if item.path.is_relative_to(here)], "loopback", failing=False)


@pytest.fixture(scope="session")
def load_engine() -> Callable[..., Engine]:
    """What `make_engine` loads engines with."""
    return with_kv(load_loopback)
