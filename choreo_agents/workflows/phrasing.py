"""What agents are told: texts by name from a TOML file, with a table for each kind of model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from choreo_agents.errors import InvalidRequestError

_OURS = "the package"
Dialect = Literal["embedded", "chat"]
"""The embedded model knows the phrases of its own language only; chat models are told things at length."""
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
"""A file of prompts may come from anybody."""


@lru_cache(maxsize=256)
def _template(text: str) -> Template:
    return _ENVIRONMENT.from_string(text)


@dataclass(frozen=True)
class Prompts:
    """The texts of one workflow. A text may hold `{{ names }}` that are filled in when it is asked for."""

    texts: Mapping[str, Any]
    source: str = _OURS

    @property
    def is_own(self) -> bool:
        """Whether some come from a user's file."""
        return self.source != _OURS

    def __call__(self, name: str, **values: Any) -> str:
        """A text.

        Raises:
            InvalidRequestError: There is none of that name, or it holds a name that has no value.
        """
        found = self.get(name, **values)
        if found is None:
            raise InvalidRequestError(f"the prompts of {self.source} have no text {name!r}: they have {self._names()}")
        return found

    def get(self, name: str, **values: Any) -> str | None:
        """The same; None where there is no such text."""
        text = self.texts.get(name)
        if text is None:
            return None
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name!r} in the prompts of {self.source} is no text: {text!r}")
        try:
            return _template(text).render(**values)
        except Exception as error:  # whatever an expression in it may raise
            raise InvalidRequestError(f"the text {name!r} of {self.source} cannot be filled in: {error}") from error

    def names(self, name: str, least: int = 0, most: int | None = None) -> tuple[str, ...]:
        """A list of different names, of so many; empty where there is none."""
        found = self.texts.get(name, [])
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise InvalidRequestError(f"{name!r} in the prompts of {self.source} is no list of texts: {found!r}")
        if len(found) < least or (most is not None and len(found) > most) or len(set(found)) < len(found):
            allowed = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
            raise InvalidRequestError(
                f"{name!r} in the prompts of {self.source} must be {allowed} different texts: {found!r}"
            )
        return tuple(found)

    def _names(self) -> str:
        return ", ".join(sorted(self.texts))


def load_prompts(workflow: str, dialect: Dialect, path: Path | None = None) -> Prompts:
    """The prompts of a workflow.

    Args:
        workflow: Its name: `tree_of_thoughts`.
        dialect: For which kind of model.
        path: A file of the user's own with a table `[embedded]` or `[chat]`; texts that it leaves out are ours.

    Raises:
        InvalidRequestError: The file is no TOML, or has texts that no such workflow knows.
    """
    ours = tomllib.loads((files("choreo_agents.workflows") / "prompts" / f"{workflow}.toml").read_text())[dialect]
    if path is None:
        return Prompts(ours)
    try:
        own = tomllib.loads(path.read_bytes().decode())
    except ValueError as error:
        raise InvalidRequestError(f"{str(path)!r} is no TOML: {error}") from error
    table = own.get(dialect)
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{str(path)!r} has no table [{dialect}]")
    unknown = sorted(set(table) - set(ours))
    if unknown:
        raise InvalidRequestError(f"{str(path)!r} has {unknown[0]!r}, which {workflow} has no use for: {sorted(ours)}")
    return Prompts({**ours, **table}, str(path))
