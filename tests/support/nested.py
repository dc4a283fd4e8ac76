"""Runs of pytest inside a test, as a user's project would have them."""

from __future__ import annotations

import pytest


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run the project's tests in this process."""
    own = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-o", "asyncio_default_fixture_loop_scope=function")
    return pytester.runpytest_inprocess(*own, *options)
