"""What simulations need."""

from __future__ import annotations

from importlib.util import find_spec

from choreo_agents.errors import InvalidRequestError


def require_simpy() -> None:
    """Raises `InvalidRequestError` if SimPy is not installed: before anything is measured."""
    if find_spec("simpy") is None:
        raise InvalidRequestError("a simulation needs SimPy: pip install 'choreo-agents[simulate]'")
