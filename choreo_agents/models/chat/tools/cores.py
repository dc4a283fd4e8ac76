"""Parses the core of one streamed call: what is between the marks of a model family."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from choreo_agents.models.chat.tools.grammar import CallGrammar, Kind, PairMarks, ToolCall
from choreo_agents.models.chat.tools.literals import Extent, from_json, to_json, unique
from choreo_agents.models.chat.tools.marked import CONTROL, bare, mark_text

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the tools' parameters, by tool name."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_BEHIND_NAME = 256
"""Maximum number of characters from the start of a call to its arguments."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys under which models write arguments, whatever their template uses."""
_HARMLESS = ("id", "type", "index")
_NAME = r"[^\s\ue000{]+"
"""Pattern of a name that ends at a control token, a blank or a brace."""
_BEHIND = r"[\s\ue000{]|$"
"""Pattern of what follows a name."""
_ANNOUNCED = re.compile(r"(\s*\ue000[^\ue001]*\ue001\s*\w*\s*)*")
_OBJECTS = re.compile(r"\s*(\[\s*)?(\{|$)")


class CallText:
    """A parser of one streamed call, or of a list of calls; its text is marked (see `marked`).

    Args:
        grammar: The family's grammar. JSON objects with name and arguments are accepted in place of other forms, too.
        close: The mark that closes a call of pairs; it is not consumed.
        schemas: Schemas of the tools, which say which values of pairs are strings.
        name: Name of the tool, if it has been read already; only the arguments follow.
    """

    def __init__(self, grammar: CallGrammar, close: str, schemas: Schemas, name: str | None = None) -> None:
        self.text = ""
        self._kind: Kind | None = None
        self._grammar, self._close, self._schemas, self._name = grammar, close, schemas, name
        self._extent = Extent()

    def take(self, text: str) -> int | None:
        """Add a piece; return how much of it belongs to the call if it ends here. Raises `ValueError` if it is none."""
        before, self.text = len(self.text), self.text + text
        if self._kind is None and (written := self.text.lstrip()):
            self._kind = self._kind_of(written[0])
        used = self._find_end(text, before)
        self.text = self.text if used is None else self.text[: before + used]
        return used

    def _kind_of(self, first: str) -> Kind:
        kind = self._grammar.kind
        if kind == "headed" and first != "{":
            raise ValueError("its arguments are not a JSON object")
        if kind != "headed" and first in "{[":
            return "object"
        if kind == "object":
            raise ValueError(f"it starts with {bare(first)!r}, and is not a JSON object")
        return kind

    def _find_end(self, text: str, before: int) -> int | None:
        if self._kind is None:
            return None
        if self._kind == "pairs":
            end = self.text.find(self._close, max(0, before - len(self._close)))
            return None if end < 0 else end - before
        if self._kind == "object" and not _OBJECTS.match(self.text):
            raise ValueError("it is a list of something other than calls")
        start = 0
        if self._kind == "named" and not self._extent.begun and (start := text.find("{")) < 0:
            if len(self.text) > _BEHIND_NAME:
                raise ValueError("no arguments follow its name")
            return None
        used = self._find_bracket_end(text[start:])
        return None if used is None else used + start

    def _find_bracket_end(self, text: str) -> int | None:
        """Return where the first bracket is closed. Control tokens are text within strings, and errors elsewhere."""
        cut = text.find(CONTROL) if not self._extent.is_text else -1
        used = self._extent.take(text if cut < 0 else text[:cut])
        if used is None and cut >= 0:
            if not self._extent.is_text:
                raise ValueError("it is cut off by a control token")
            # The text before the control token has opened a string.
            used = self._extent.take(text[cut:])
            used = None if used is None else used + cut
        return used

    @property
    def name(self) -> str | None:
        """Name of the first tool that is called, as far as it is written."""
        match self._kind:
            case "object":
                key = re.escape(to_json(self._grammar.name_key))
                start = r'[\s\[]*(?:\{[^{}]*"function"\s*:\s*)?\{\s*'
                name_match = re.match(rf'{start}(?:{key}|"name")\s*:\s*({_STRING})', self.text)
                return None if name_match is None else _unquote(name_match[1])
            case "named" if self._extent.begun:
                return name_before(self.text.lstrip(), self._schemas)
            case "pairs" if (key := self._marks.first.strip()) in self.text:
                return bare(self.text.partition(key)[0]).strip()
        return self._name

    def calls(self) -> list[ToolCall]:
        """Return all calls; raise `ValueError` if any part cannot be understood."""
        match self._kind:
            case "object":
                value = from_json(bare(self.text))
                return [self._parse_object(call) for call in (value if isinstance(value, list) else [value])]
            case "pairs":
                return [self._parse_pairs()]
        if not (name := self.name):
            raise ValueError("it has no name")
        text = self.text if self._kind == "headed" else self.text.lstrip().removeprefix(mark_text(name))
        before, start, arguments = text.partition("{")
        if not self._is_frame(before):
            raise ValueError(f"{bare(name + before).strip()!r} is not a tool name")
        return [self._make_call(name, from_json(bare(start + arguments)))]

    def _is_frame(self, text: str) -> bool:
        """Return whether this may be between a name and its arguments: template text, or text after control tokens."""
        return text.strip() in ("", self._grammar.before_arguments.strip()) or bool(_ANNOUNCED.fullmatch(text))

    def _parse_object(self, call: Any) -> ToolCall:
        """Parse a call in JSON. Unknown keys are errors, since they may hold arguments."""
        if isinstance(call, dict) and isinstance(inside := call.get("function"), dict):
            _require_known(call, {"function", *_HARMLESS})
            call = inside
        if not isinstance(call, dict):
            raise ValueError(f"{call!r} is not a call")
        names = {self._grammar.name_key, "name"} & call.keys()
        name = call[names.pop()] if len(names) == 1 else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"it has no {self._grammar.name_key!r}")
        return self._make_call(name, self._arguments_of(name, call))

    def _arguments_of(self, name: str, call: Mapping[str, Any]) -> Any:
        """Return the arguments of an object that has the name and the arguments of a call."""
        keys = {self._grammar.arguments_key, *_ARGUMENTS} & call.keys()
        # Without an arguments key, a key that is ignored otherwise may be an argument.
        ignored = set(_HARMLESS) - (set() if keys else self._fields(name).keys())
        _require_known(call, {*keys, *ignored, self._grammar.name_key, "name"})
        if any(call.get(key, name) != name for key in (self._grammar.name_key, "name")):
            raise ValueError("it names several tools")
        if len(keys) > 1:
            raise ValueError(f"it has arguments in several places: {', '.join(map(repr, sorted(keys)))}")
        arguments = call[keys.pop()] if keys else {}
        return from_json(arguments) if isinstance(arguments, str) else arguments

    def _make_call(self, name: str, arguments: Any) -> ToolCall:
        """Make a call; unwrap arguments that hold a whole call, or the arguments under a key."""
        arguments = self._arguments_of(name, arguments) if self._is_wrapped(name, arguments) else arguments
        if not isinstance(arguments, dict) or self._is_wrapped(name, arguments):
            raise ValueError("its arguments are not a JSON object")
        return ToolCall(name, arguments)

    def _is_wrapped(self, name: str, arguments: Any) -> bool:
        """Return whether arguments are wrapped under a key that is no parameter of the tool."""
        schema, fields = self._schemas.get(name, {}), self._fields(name)
        takes_any = "properties" not in schema or schema.get("additionalProperties")
        keys = arguments.keys() if isinstance(arguments, dict) and not takes_any else set[str]()
        return bool(keys & {self._grammar.arguments_key, *_ARGUMENTS}) and not keys & fields.keys()

    def _fields(self, name: str) -> Mapping[str, Any]:
        return self._schemas.get(name, {}).get("properties") or {}

    @property
    def _marks(self) -> PairMarks:
        assert self._grammar.pairs is not None
        return self._grammar.pairs

    def _parse_pairs(self) -> ToolCall:
        key, inner, value_end = self._marks.first.strip(), self._marks.inner.strip(), self._marks.value_end
        name, mark, tail = self.text.partition(key)
        name, is_frame = bare(name).strip(), CONTROL in name
        if is_frame or (name not in self._schemas and not re.fullmatch(r"[\w.-]+", name)):
            raise ValueError("it has no name")
        pairs, tail = list[tuple[str, str]](), mark + tail
        pair = re.compile(rf"\s*{re.escape(key)}(.*?){_blanks_pattern(inner)}(.*?){re.escape(value_end)}", re.DOTALL)
        while (match := pair.match(tail)) is not None:
            pairs.append((bare(match[1]).strip(), bare(match[2])))
            tail = tail[match.end() :]
        if tail.strip():
            raise ValueError(f"{bare(tail).strip()!r} is not a key and a value")
        fields = self._fields(name)
        return ToolCall(name, unique((key, _parse_value(value, fields.get(key))) for key, value in pairs))


def name_before(text: str, schemas: Schemas) -> str | None:
    """Read a name at the start of marked text: the longest tool name that matches, else what looks like a name."""
    names = [name for name in schemas if re.match(rf"{re.escape(mark_text(name))}(?:{_BEHIND})", text)]
    match = re.match(rf"({_NAME})(?:{_BEHIND})", text)
    return max(names, key=len, default=None if match is None else bare(match[1]))


def _require_known(call: Mapping[str, Any], allowed: Collection[str]) -> None:
    if unknown := [key for key in call if key not in allowed]:
        raise ValueError(f"it has an unknown key, {unknown[0]!r}")


def _blanks_pattern(mark: str) -> str:
    """Return a pattern of a mark in which blanks match any blanks or none."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", mark))


def _parse_value(value: str, schema: Any) -> Any:
    """Parse a value that is written bare if it is a string, and as JSON otherwise."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return from_json(value)
    except ValueError:
        return value


def _unquote(quoted: str) -> str | None:
    try:
        return str(from_json(bare(quoted)))
    except ValueError:
        return None
