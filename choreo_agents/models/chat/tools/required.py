"""A call that must be made, as a grammar: what a family writes around it, and the tools' own schemas within."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.chat.tools.literals import to_json

_PLAIN = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""As `json.dumps` writes it."""


def required_call(
    how: ToolsFormat, tools: Sequence[Mapping[str, Any]], controls: Mapping[int, str]
) -> tuple[str, frozenset[int]]:
    """A grammar, in Lark's notation, of a turn with one call of one of these tools and nothing else; and its marks.

    Args:
        how: The family's.
        tools: Any of which may be called.
        controls: The model's control tokens.

    Raises:
        InvalidRequestError: Its arguments are no JSON.
    """
    grammar = how.grammar
    if grammar.kind in ("python", "pairs"):
        raise InvalidRequestError(
            'its model writes arguments of calls otherwise than as JSON, and cannot be made to call: leave "auto", and '
            "say in its system prompt when it is to call"
        )

    used: set[int] = set()
    numbers = {written: token for token, written in controls.items()}

    def marks(text: str) -> str:
        return _marks(text, numbers, used)

    rules = [f"start: {marks(grammar.before)} call {marks(grammar.after + ''.join(how.ends))}"]
    rules += ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        function = function_of(tool)
        name = str(function["name"])
        name = to_json(name)[1:-1] if grammar.kind == "object" else name
        given = {"additionalProperties": False, **(function.get("parameters") or {"type": "object"}), **_PLAIN}
        lead = f"{marks(grammar.before_name)} {_literal(name)} {marks(grammar.before_arguments)}"
        rules += [f"call_{number}: {lead} given_{number} {marks(grammar.end)}"]
        rules += [f"given_{number}: %json {json.dumps(given)}"]
    return "\n".join(rules), frozenset(used)


def _marks(text: str, controls: Mapping[str, int], used: set[int]) -> str:
    """A text of the family's, in which control tokens are themselves; those are noted."""
    known = "|".join(map(re.escape, sorted([ID, *filter(None, controls)], key=len, reverse=True)))
    parts = [part for part in re.split(f"({known})", text) if part]
    used.update(controls[part] for part in parts if part in controls)
    return " ".join(
        f"<[{controls[part]}]>" if part in controls else "/[a-zA-Z0-9]{9}/" if part == ID else _literal(part)
        for part in parts
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
