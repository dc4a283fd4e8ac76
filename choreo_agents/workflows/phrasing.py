"""Prompts of the workflows: named texts from TOML files, with a table for each kind of model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from choreo_agents.errors import InvalidRequestError

Dialect = Literal["embedded", "chat"]
"""Kind of model: the embedded one knows only the phrases of its own language, chat models need full instructions."""
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
"""Sandbox for templates: a file of prompts may be untrusted."""


_template = lru_cache(maxsize=256)(_ENVIRONMENT.from_string)


@dataclass(frozen=True)
class Prompts:
    """The prompts of one workflow, by name. A prompt is a Jinja template whose `{{ names }}` get values on access."""

    texts: Mapping[str, Any]
    source: str = "the package"

    def __call__(self, name: str, **values: Any) -> str:
        """Return a prompt with its values filled in.

        Raises:
            InvalidRequestError: There is no such prompt, or one of its names has no value.
        """
        text = self.texts.get(name)
        if text is None:
            names = ", ".join(sorted(self.texts))
            raise InvalidRequestError(f"the prompts of {self.source} have no text {name!r}: they have {names}")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name!r} in the prompts of {self.source} must be a string: {text!r}")
        try:
            return _template(text).render(**values)
        except Exception as error:  # whatever an expression in it may raise
            raise InvalidRequestError(f"the text {name!r} of {self.source} cannot be formatted: {error}") from error

    def names(self, name: str, least: int = 0, most: int | None = None) -> tuple[str, ...]:
        """Return a list of `least` to `most` distinct texts; empty if there is no such list.

        Raises:
            InvalidRequestError: It is no list of texts, has duplicates, or has too few or too many.
        """
        names = self.texts.get(name, [])
        is_valid = isinstance(names, list) and all(isinstance(text, str) for text in names)
        if not is_valid or not least <= len(names) <= (most or len(names)) or len(set(names)) < len(names):
            allowed = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
            raise InvalidRequestError(
                f"{name!r} in the prompts of {self.source} must be a list of strings, {allowed} different ones: "
                f"{names!r}"
            )
        return tuple(names)


def load_prompts(workflow: str, dialect: Dialect, path: Path | None = None) -> Prompts:
    """Load the prompts of a workflow.

    Args:
        workflow: Name of the workflow, as in `tree_of_thoughts`.
        dialect: Kind of model.
        path: The user's TOML file with a table `[embedded]` or `[chat]`; bundled prompts fill in what it leaves out.

    Raises:
        InvalidRequestError: The file is no TOML, or has prompts that the workflow does not use.
    """
    ours = tomllib.loads((files("choreo_agents.workflows") / "prompts" / f"{workflow}.toml").read_text())[dialect]
    if path is None:
        return Prompts(ours)
    try:
        own = tomllib.loads(path.read_bytes().decode())
    except ValueError as error:
        raise InvalidRequestError(f"{str(path)!r} is not valid TOML: {error}") from error
    table = own.get(dialect)
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{str(path)!r} has no table [{dialect}]")
    unknown = sorted(set(table) - set(ours))
    if unknown:
        raise InvalidRequestError(f"{str(path)!r} has {unknown[0]!r}, which {workflow} does not use: {sorted(ours)}")
    return Prompts({**ours, **table}, str(path))
