"""Calls that must be made, as a grammar: a frame as the model's format has it, a name, arguments by their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.chat.tools.literals import is_keyword
from choreo_agents.models.guides.sources import JSON_BLANKS

_ID = "/[a-zA-Z0-9]{9}/"
_PYTHON = {"boolean": '("True" | "False")', "null": '"None"'}


def call_grammar(how: ToolsFormat, tools: Sequence[Mapping[str, Any]], controls: Mapping[str, int]) -> str:
    """One call of one of these tools, in Lark's notation.

    Args:
        how: How the model writes calls.
        tools: Their descriptions.
        controls: Ids of the control tokens that may stand in frames.
    """
    writing = _Writing(how, controls)
    ways = [writing.call(number, function_of(tool)) for number, tool in enumerate(tools)]
    # As headers end without the space that stands before a first word.
    return "\n".join([f'start: " "? ({" | ".join(ways)})', *writing.rules])


class _Writing:
    """Rules of one grammar."""

    def __init__(self, how: ToolsFormat, controls: Mapping[str, int]) -> None:
        self._grammar, self._controls = how.grammar, controls
        longest = sorted(controls, key=len, reverse=True)
        self._piece = re.compile("(" + "|".join(map(re.escape, [*longest, ID])) + ")")
        self.rules: list[str] = []

    def call(self, number: int, tool: Mapping[str, Any]) -> str:
        """The rule of a call of one tool."""
        grammar, name = self._grammar, str(tool["name"])
        schema = {"additionalProperties": False, **(tool.get("parameters") or {"type": "object"})}
        rule = f"call_{number}"
        before, after = self._frame(grammar.before), self._frame(grammar.after)
        if grammar.kind == "python":
            core = f'{_text(name + "(")} {self._keywords(rule, schema)} ")"'
        elif grammar.pairs is not None:
            core, after = f"{_text(name)} {self._pairs(rule, schema)}", ""
        else:
            said = json.dumps(name, ensure_ascii=False)[1:-1] if grammar.kind == "object" else name
            frames = (grammar.before_name, grammar.before_arguments, grammar.end)
            opening, middle, end = map(self._frame, frames)
            core = f"{opening} {_text(said)} {middle} {self._json(rule, schema)} {end}"
        self.rules.append(f"{rule}: {before} {core} {after}")
        return rule

    def _frame(self, text: str) -> str:
        """A frame: its control tokens by their ids."""
        parts = (part for part in self._piece.split(text) if part)
        return " ".join(_ID if part == ID else self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        return f"<[{self._controls[part]}]>" if part in self._controls else _text(part)

    def _json(self, rule: str, schema: Mapping[str, Any]) -> str:
        self.rules.append(f"{rule}_json: %json {json.dumps({**schema, 'x-guidance': JSON_BLANKS})}")
        return f"{rule}_json"

    def _arguments(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Names, schemas, and whether they must be given."""
        required = schema.get("required") or ()
        found = (schema.get("properties") or {}).items()
        return [
            (name, {**each, **_shared(schema)} if isinstance(each, Mapping) else each, name in required)
            for name, each in found
        ]

    def _keywords(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Keyword arguments as Python writes them, in the order of the schema: those that it can write, or has to."""
        arguments = [each for each in self._arguments(schema) if each[2] or is_keyword(each[0])]
        written = [
            (f"{_text(name + '=')} {self._python(f'{rule}_{number}', each)}", must)
            for number, (name, each, must) in enumerate(arguments)
        ]
        return self._listed(rule, written, '", "')

    def _listed(self, rule: str, written: Sequence[tuple[str, bool]], between: str) -> str:
        """Some that may and some that must be there, one after the other."""
        rest = '""'
        for number in range(len(written), 0, -1):
            one, must = written[number - 1]
            # What follows when something stands before it, and when nothing does.
            self.rules.append(
                f"{rule}_more_{number}: {between} {one} {self._more(rule, number + 1, written)}"
                + ("" if must else f" | {self._more(rule, number + 1, written)}")
            )
            rest = f"{one} {self._more(rule, number + 1, written)}" + ("" if must else f" | {rest}")
        return f"({rest})"

    def _more(self, rule: str, number: int, written: Sequence[tuple[str, bool]]) -> str:
        return f"{rule}_more_{number}" if number <= len(written) else '""'

    def _python(self, rule: str, schema: Any) -> str:
        """A value. What stands inside lists and objects is written as JSON has it, which is read, too."""
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kinds, str) and kinds in _PYTHON:
            return _PYTHON[kinds]
        ways = schema.get("anyOf") if isinstance(schema, Mapping) else None
        if ways:
            told = [{**way, **_shared(schema)} if isinstance(way, Mapping) else way for way in ways]
            return "(" + " | ".join(self._python(f"{rule}_{n}", way) for n, way in enumerate(told)) + ")"
        return self._json(rule, schema if isinstance(schema, Mapping) else {})

    def _pairs(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Keys and values between marks."""
        marks = self._grammar.pairs
        assert marks is not None
        arguments = self._arguments(schema)
        if not arguments:
            return self._frame(marks.empty)
        written = []
        for number, (name, each, must) in enumerate(arguments):
            is_text = isinstance(each, Mapping) and each.get("type") == "string"
            value = _bare(each) if is_text else self._json(f"{rule}_{number}", each)
            written.append((f"{_text(name)} {self._frame(marks.inner)} {value}", must))
        listed = self._listed(rule, written, self._frame(marks.next))
        some = f"{self._frame(marks.first)} {listed} {self._frame(marks.last)}"
        return some if any(must for _, must in written) else f"({some} | {self._frame(marks.empty)})"


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What the parts of a schema may refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _bare(schema: Mapping[str, Any]) -> str:
    """A text without quotes, before a mark: one of those that its schema names, or of the length that it asks for."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if named:
        return "(" + " | ".join(_text(each) for each in named if isinstance(each, str)) + ")"
    return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _text(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)
