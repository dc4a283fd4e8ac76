"""Builds grammars of tool calls: the marks of the model's format, a tool's name, arguments by its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.constraints.sources import JSON_BLANKS, LENIENT, log_unenforced, without_annotations

_ID = "/[a-zA-Z0-9]{9}/"
_CONSTRAIN = "<|constrain|>"
"""A control token that models may write before the format of arguments, in headers of calls."""


def call_grammar(
    how: ToolsFormat,
    tools: Sequence[Mapping[str, Any]],
    controls: Mapping[str, int],
    *,
    several: bool = False,
    answers: bool = False,
) -> str:
    """Write a grammar, in Lark's notation, of one call of one of these tools.

    Args:
        how: The model's format of calls.
        tools: Descriptions of the tools.
        controls: Ids of control tokens, by text.
        several: Whether several calls may follow each other.
        answers: Whether an answer may take the place of calls, by the grammar named `answer`.
    """
    writing = _GrammarWriter(how, controls)
    calls = [writing.call(number, function_of(tool)) for number, tool in enumerate(tools)]
    return "\n".join([writing.start(f"({' | '.join(calls)})", several=several, answers=answers), *writing.rules])


class _GrammarWriter:
    """A writer of the rules of one grammar."""

    def __init__(self, how: ToolsFormat, controls: Mapping[str, int]) -> None:
        self._how, self._grammar = how, how.grammar
        longest = sorted(controls, key=len, reverse=True)
        self._piece = re.compile("(" + "|".join(map(re.escape, [*longest, ID])) + ")")
        self._terminals = {ID: _ID, **{control: f"<[{number}]>" for control, number in controls.items()}}
        self.rules: list[str] = []

    def start(self, call: str, *, several: bool, answers: bool) -> str:
        """Return the start rule: calls with the marks around them, or an answer."""
        grammar, lead = self._grammar, self._frame(self._how.lead)
        before, between, after = map(self._frame, (grammar.before, grammar.between, grammar.closing))
        more = f"({between} {call})*" if several else ""
        # A call in a header is a turn of its own; in other formats, an answer has no lead as its header is complete.
        calls, lead = (call, lead) if self._how.is_headed else (f"{before} {call} {more} {after}", "")
        # Headers end without the space before the first word, so a model may start with one.
        opened = [f"{self._frame(mark)} {calls}" for mark in grammar.may_open] if several else []
        return "start: " + " | ".join([f'" "? {calls}', *opened, *([f"{lead} @answer"] if answers else [])])

    def call(self, number: int, tool: Mapping[str, Any]) -> str:
        """Add the rule of a call of one tool, without the marks around calls; return the rule's name."""
        grammar, name = self._grammar, str(tool["name"])
        parameters = without_annotations(tool.get("parameters") or {"type": "object"})
        schema = {"additionalProperties": False, **parameters}
        rule = f"call_{number}"
        if grammar.pairs is not None:
            core = f"{_literal(name)} {self._pairs(rule, schema)}"
        elif grammar.is_bare and grammar.before_name.count("{") == 1:
            core = self._object(rule, name, schema)
        else:
            quoted = json.dumps(name, ensure_ascii=False)[1:-1] if grammar.kind == "object" else name
            frames = (grammar.before_name, grammar.before_arguments, grammar.end)
            opening, middle, end = map(self._frame, frames)
            header = self._header(quoted) if self._how.is_headed else f"{opening} {_literal(quoted)} {middle}"
            core = f"{header} {self._json(rule, schema)} {end}"
        self.rules.append(f"{rule}: {core}")
        return rule

    def _object(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        """Return the rule of a call that is only JSON, as a schema of the whole object."""
        grammar = self._grammar
        written = grammar.before_name + json.dumps(name)[1:-1] + grammar.before_arguments + "{}" + grammar.end
        keys = {key: {"const": value} for key, value in json.loads(written).items()}
        keys[grammar.arguments_key] = {"$ref": "#/$defs/whole"}
        call = {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}
        return self._json(rule, {**call, "$defs": {"whole": _as_definition(schema)}})

    def _header(self, name: str) -> str:
        """Return a header with the tool's name before its channel, as templates write it, or after it, as models do."""
        grammar = self._grammar
        channel, blank, form = grammar.before_arguments.removesuffix(grammar.content).rpartition(" ")
        to, channel = f"{self._frame(grammar.before)} {_literal(name)}", self._frame(channel)
        constrain = f"{self._frame(_CONSTRAIN)}?" if _CONSTRAIN in self._terminals else ""
        return f"({to} {channel} | {channel} {to}) {_literal(blank)} {constrain} {self._frame(form + grammar.content)}"

    def _frame(self, text: str) -> str:
        """Return template text as terminals, control tokens by their ids."""
        parts = (part for part in self._piece.split(text) if part)
        return " ".join(self._terminals.get(part) or _literal(part) for part in parts)

    def _json(self, rule: str, schema: Mapping[str, Any]) -> str:
        # What tokens cannot enforce is checked when the call is made, as for unconstrained calls.
        log_unenforced(json.dumps({**schema, "x-guidance": JSON_BLANKS}), "the arguments of a tool")
        self.rules.append(f"{rule}_json: %json {json.dumps({**schema, 'x-guidance': {**JSON_BLANKS, **LENIENT}})}")
        return f"{rule}_json"

    def _write_list(self, rule: str, written: Sequence[tuple[str, bool]], between: str) -> str:
        """Write a separated list of optional and required items, in order."""
        listed = '""'
        for number in range(len(written), 0, -1):
            item, must = written[number - 1]
            then = f"{rule}_more_{number + 1}" if number < len(written) else '""'
            # `_more_N` continues a list that has an item already; `listed` is the list from item N on if it has none.
            self.rules.append(f"{rule}_more_{number}: {between} {item} {then}" + ("" if must else f" | {then}"))
            listed = f"{item} {then}" + ("" if must else f" | {listed}")
        return f"({listed})"

    def _pairs(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Write keys and values between marks."""
        marks = self._grammar.pairs
        assert marks is not None
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties:
            return self._frame(marks.empty)
        written = []
        for number, name in enumerate(properties):
            part = _standalone(properties[name], schema)
            is_text = isinstance(part, Mapping) and part.get("type") == "string"
            value = _bare_text(part) if is_text else self._json(f"{rule}_{number}", part)
            written.append((f"{_literal(name)} {self._frame(marks.inner)} {value}", name in required))
        listed = self._write_list(rule, written, self._frame(marks.next))
        some = f"{self._frame(marks.first)} {listed} {self._frame(marks.last)}"
        return some if any(must for _, must in written) else f"({some} | {self._frame(marks.empty)})"


def _standalone(part: Any, schema: Mapping[str, Any]) -> Any:
    """Return a part of a schema as a schema of its own, with the whole among its definitions for references."""
    if not isinstance(part, Mapping) or '"$ref"' not in json.dumps(part):
        return part
    return {**_redirect_refs(part), "$defs": {"whole": _as_definition(schema)}}


def _as_definition(schema: Mapping[str, Any]) -> Any:
    """Return a schema as it is put among the definitions of another."""
    return _redirect_refs({name: value for name, value in schema.items() if name != "$id"})


def _redirect_refs(schema: Any) -> Any:
    """Return a schema with references redirected to `#/$defs/whole`."""
    if isinstance(schema, list):
        return [_redirect_refs(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    to = schema.get("$ref")
    moved = {"$ref": f"#/$defs/whole{to[1:]}"} if isinstance(to, str) and (to == "#" or to.startswith("#/")) else {}
    return {**{name: _redirect_refs(value) for name, value in schema.items()}, **moved}


def _bare_text(schema: Mapping[str, Any]) -> str:
    """Write an unquoted string before a mark: one of the schema's constants, or any of its length."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if named:
        return "(" + " | ".join(_literal(value) for value in named if isinstance(value, str)) + ")"
    return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _literal(text: str) -> str:
    """Return a text as a literal of Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
