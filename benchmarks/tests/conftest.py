"""Fixtures that the tests of the product have, too, and the commands that are added to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import embedded, engine, hold_steps, load_engine, logits_by_seed, make_engine, tiny, tiny_path
from support.installed import BENCHMARKS, install

__all__ = ["embedded", "engine", "hold_steps", "load_engine", "logits_by_seed", "make_engine", "tiny", "tiny_path"]


@pytest.fixture(scope="session", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the metadata of this distribution, so that `choreo` finds its commands whatever else is installed."""
    with pytest.MonkeyPatch.context() as patch:
        install(BENCHMARKS, site := tmp_path_factory.mktemp("site"))
        patch.syspath_prepend(site)
        yield
