"""What plots need."""

from __future__ import annotations

from importlib.util import find_spec

from choreo_agents.errors import InvalidRequestError


def require_plots() -> None:
    """Raises `InvalidRequestError` if matplotlib is not installed: better before a long run than after it."""
    if find_spec("matplotlib") is None:
        raise InvalidRequestError("a plot needs matplotlib: pip install choreo-bench")
