"""Calls as a grammar: a frame as the model's format has it, a name, arguments by their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.chat.tools.literals import is_keyword
from choreo_agents.models.constraints.sources import JSON_BLANKS, require_an_end, without_annotations

_ID = "/[a-zA-Z0-9]{9}/"
_CONSTRAIN = "<|constrain|>"
"""A control token that models may put before the form of arguments, in headers of calls."""
_PYTHON = {"boolean": '("True" | "False")', "null": '"None"'}


def call_grammar(
    how: ToolsFormat,
    tools: Sequence[Mapping[str, Any]],
    controls: Mapping[str, int],
    options: Mapping[str, Any],
    *,
    several: bool = False,
    answers: bool = False,
) -> str:
    """One call of one of these tools, in Lark's notation.

    Args:
        how: How the model writes calls.
        tools: Their descriptions.
        controls: Ids of the control tokens that may stand in frames.
        options: Of llguidance, for arguments.
        several: Whether several may be made, as where none must be.
        answers: Whether an answer may be given in their place, which the grammar of the name `answer` leads.
    """
    writing = _Writing(how, controls, {**JSON_BLANKS, **options})
    ways = [writing.call(number, function_of(tool)) for number, tool in enumerate(tools)]
    return "\n".join([writing.start(f"({' | '.join(ways)})", several=several, answers=answers), *writing.rules])


class _Writing:
    """Rules of one grammar."""

    def __init__(self, how: ToolsFormat, controls: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self._how, self._grammar, self._controls, self._options = how, how.grammar, controls, options
        longest = sorted(controls, key=len, reverse=True)
        self._piece = re.compile("(" + "|".join(map(re.escape, [*longest, ID])) + ")")
        self.rules: list[str] = []

    def start(self, call: str, *, several: bool, answers: bool) -> str:
        """The rule of all that is said: calls with what stands around them, or an answer."""
        grammar, lead = self._grammar, self._frame(self._how.lead)
        texts = (grammar.before, grammar.between, "" if grammar.pairs is not None else grammar.after)
        before, between, after = map(self._frame, texts)
        more = f"({between} {call})*" if several else ""
        # A call with a header is a turn of its own; other answers stand behind the whole of theirs.
        calls, lead = (call, lead) if self._how.is_headed else (f"{before} {call} {more} {after}", "")
        # As headers end without the space that stands before a first word.
        opened = [f"{self._frame(mark)} {calls}" for mark in grammar.may_open] if several else []
        return "start: " + " | ".join([f'" "? {calls}', *opened, *([f"{lead} @answer"] if answers else [])])

    def call(self, number: int, tool: Mapping[str, Any]) -> str:
        """The rule of a call of one tool, without what stands around calls."""
        grammar, name = self._grammar, str(tool["name"])
        parameters = without_annotations(tool.get("parameters") or {"type": "object"})
        schema = {"additionalProperties": False, **parameters}
        require_an_end(schema, f"arguments of {name!r}")
        rule = f"call_{number}"
        if grammar.kind == "python":
            core = f'{_text(name + "(")} {self._keywords(rule, schema)} ")"'
        elif grammar.pairs is not None:
            core = f"{_text(name)} {self._pairs(rule, schema)}"
        elif grammar.kind == "object" and grammar.is_bare and grammar.before_name.count("{") == 1:
            core = self._object(rule, name, schema)
        else:
            said = json.dumps(name, ensure_ascii=False)[1:-1] if grammar.kind == "object" else name
            frames = (grammar.before_name, grammar.before_arguments, grammar.end)
            opening, middle, end = map(self._frame, frames)
            header = self._header(said) if self._how.is_headed else f"{opening} {_text(said)} {middle}"
            core = f"{header} {self._json(rule, schema)} {end}"
        self.rules.append(f"{rule}: {core}")
        return rule

    def _object(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        """A call that is nothing but JSON, as a schema: it is read sign by sign like JSON that answers."""
        grammar = self._grammar
        written = grammar.before_name + json.dumps(name)[1:-1] + grammar.before_arguments + "{}" + grammar.end
        keys = {key: {"const": value} for key, value in json.loads(written).items()}
        keys[grammar.arguments_key] = {"$ref": "#/$defs/whole"}
        call = {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}
        return self._json(rule, {**call, "$defs": {"whole": _whole(schema)}})

    def _header(self, name: str) -> str:
        """A header that says whom it calls: before its channel, as templates write it, or behind, as models do."""
        grammar = self._grammar
        channel, blank, form = grammar.before_arguments.removesuffix(grammar.content).rpartition(" ")
        to, channel = f"{self._frame(grammar.before)} {_text(name)}", self._frame(channel)
        constrain = f"{self._frame(_CONSTRAIN)}?" if _CONSTRAIN in self._controls else ""
        return f"({to} {channel} | {channel} {to}) {_text(blank)} {constrain} {self._frame(form + grammar.content)}"

    def _frame(self, text: str) -> str:
        """A frame: its control tokens by their ids."""
        parts = (part for part in self._piece.split(text) if part)
        return " ".join(_ID if part == ID else self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        return f"<[{self._controls[part]}]>" if part in self._controls else _text(part)

    def _json(self, rule: str, schema: Mapping[str, Any]) -> str:
        self.rules.append(f"{rule}_json: %json {json.dumps({**schema, 'x-guidance': self._options})}")
        return f"{rule}_json"

    def _arguments(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Names, schemas, and whether they must be given."""
        required = schema.get("required") or ()
        found = (schema.get("properties") or {}).items()
        return [(name, _part(each, schema), name in required) for name, each in found]

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
            then = f"{rule}_more_{number + 1}" if number < len(written) else '""'
            # What follows when something stands before it, and when nothing does.
            self.rules.append(f"{rule}_more_{number}: {between} {one} {then}" + ("" if must else f" | {then}"))
            rest = f"{one} {then}" + ("" if must else f" | {rest}")
        return f"({rest})"

    def _python(self, rule: str, schema: Any) -> str:
        """A value. What stands inside lists and objects is written as JSON has it, which is read, too."""
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kinds, str) and kinds in _PYTHON:
            return _PYTHON[kinds]
        ways = schema.get("anyOf") if isinstance(schema, Mapping) else None
        if ways:
            shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            told = [{**way, **shared} if isinstance(way, Mapping) else way for way in ways]
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


def _part(part: Any, schema: Mapping[str, Any]) -> Any:
    """A part of a schema by itself. What it may refer to, the whole schema, stands among its definitions."""
    if not isinstance(part, Mapping) or '"$ref"' not in json.dumps(part):
        return part
    return {**_referring(part), "$defs": {"whole": _whole(schema)}}


def _whole(schema: Mapping[str, Any]) -> Any:
    """A schema as it stands among the definitions of another."""
    return _referring({name: each for name, each in schema.items() if name != "$id"})


def _referring(schema: Any) -> Any:
    """The same, with references to where the whole schema stands now."""
    if isinstance(schema, list):
        return [_referring(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    to = schema.get("$ref")
    moved = {"$ref": f"#/$defs/whole{to[1:]}"} if isinstance(to, str) and (to == "#" or to.startswith("#/")) else {}
    return {**{name: _referring(each) for name, each in schema.items()}, **moved}


def _bare(schema: Mapping[str, Any]) -> str:
    """A text without quotes, before a mark: one of those that its schema names, or of the length that it asks for."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if named:
        return "(" + " | ".join(_text(each) for each in named if isinstance(each, str)) + ")"
    return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _text(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)
