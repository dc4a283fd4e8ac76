"""Collector of problems, so that all problems of a file are reported at once."""

from __future__ import annotations

from collections.abc import Iterable

from choreo_agents import arguments
from choreo_agents.errors import PMLError, PMLProblem
from choreo_agents.pml.markup.syntax import SourcePlace


class Problems:
    """Problems found so far."""

    def __init__(self) -> None:
        self.found: list[PMLProblem] = []

    def add(self, place: SourcePlace, message: str, expected: str = "") -> None:
        self.found.append(PMLProblem(place.file, place.line, place.column, message, expected))

    def require_none(self) -> None:
        """Raise a `PMLError` with all problems, if there are any."""
        if self.found:
            raise PMLError(dict.fromkeys(self.found))


def nearest(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Suggest replacements for an unknown name: the nearest candidate, all if they are few, or `otherwise`."""
    names = sorted(set(candidates) - {""})
    if (close := arguments.nearest(name, names)) is not None:
        return repr(close)
    return " or ".join(map(repr, names)) if 0 < len(names) <= 5 else otherwise
