"""One call as it comes: what stands between the marks of a family."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from choreo_agents.models.chat.tools.grammar import CallGrammar, Kind, PairMarks, ToolCall
from choreo_agents.models.chat.tools.literals import Extent, from_json, from_python, to_json, unique
from choreo_agents.models.chat.tools.marked import CONTROL, bare, has_control, marked

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by its name."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_BEHIND_NAME = 256
"""Characters between a name and its arguments at most."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys under which models write what they call with, whatever their template says."""
_HARMLESS = ("id", "type", "index")
_PYTHON = r"[^\W\d][\w.]*"
_BEFORE_PYTHON = r"\s*\("
_NAME = r"[^\s\ue000{]+"
"""Up to a control token, a blank or the end of a line."""
_BEFORE = r"[\s\ue000{]|$"
_ANNOUNCED = re.compile(r"(\s*\ue000[^\ue001]*\ue001\s*\w*\s*)*")
_OBJECTS = re.compile(r"\s*(\[\s*)?(\{|$)")


class BrokenCallError(Exception):
    """It cannot become a call."""


class CallText:
    """What is written of one call, or of a list of them, as it comes. Text is marked (see `marked`).

    Args:
        grammar: The family's. JSON objects with a name and arguments are read in the place of any other form, too.
        close: What closes a call of pairs; kept for who reads on.
        schemas: Say which values of pairs are texts.
        name: Of the tool, if it has been read before: what is written are its arguments.
    """

    def __init__(self, grammar: CallGrammar, close: str, schemas: Schemas, name: str | None = None) -> None:
        self.text = ""
        self._kind: Kind | None = None
        self._grammar, self._close, self._schemas, self._name = grammar, close, schemas, name
        self._extent = Extent("\"'" if grammar.kind == "python" else '"')

    def take(self, text: str) -> int | None:
        """The next piece; how much of it belongs to the call if that ends in it. Raises `BrokenCallError`."""
        before, self.text = len(self.text), self.text + text
        if self._kind is None and (written := self.text.lstrip()):
            self._kind = self._kind_of(written[0])
        used = self._end(text, before)
        self.text = self.text if used is None else self.text[: before + used]
        return used

    def _kind_of(self, first: str) -> Kind:
        kind = self._grammar.kind
        if kind == "headed" and first != "{":
            raise BrokenCallError("its arguments are no JSON object")
        if kind != "headed" and first in "{[":
            self._extent = Extent('"')
            return "object"
        if kind == "object":
            raise BrokenCallError(f"it starts with {bare(first)!r}, and is no JSON object")
        return kind

    def _end(self, text: str, before: int) -> int | None:
        if self._kind is None:
            return None
        if self._kind == "pairs":
            end = self.text.find(self._close, max(0, before - len(self._close)))
            return None if end < 0 else end - before
        if self._kind == "python" and not self._extent.begun and not self._may_be_python():
            raise BrokenCallError("it is no call of a function")
        if self._kind == "object" and not _OBJECTS.match(self.text):
            raise BrokenCallError("it is a list of other things than calls")
        start = 0
        if self._kind == "named" and not self._extent.begun and (start := text.find("{")) < 0:
            if len(self.text) > _BEHIND_NAME:
                raise BrokenCallError("no arguments follow its name")
            return None
        used = self._bracketed(text[start:])
        return None if used is None else used + start

    def _may_be_python(self) -> bool:
        text = self.text.lstrip()
        is_known = any(text.startswith(name[: len(text)]) for name in map(marked, self._schemas))
        return is_known or re.match(rf"{_PYTHON}\s*(\(|$)", text) is not None

    def _bracketed(self, text: str) -> int | None:
        """Where the first bracket is closed. Within a string a control token is text, and elsewhere no part of it."""
        cut = text.find(CONTROL) if not self._extent.is_text else -1
        used = self._extent.take(text if cut < 0 else text[:cut])
        if used is None and cut >= 0:
            if not self._extent.is_text:
                raise BrokenCallError("it is cut off by a control token")
            # The piece before it has opened a string.
            used = self._extent.take(text[cut:])
            used = None if used is None else used + cut
        return used

    @property
    def name(self) -> str | None:
        """Of the first tool that it names, as far as it is written."""
        match self._kind:
            case "object":
                key = re.escape(to_json(self._grammar.name_key))
                start = r'[\s\[]*(?:\{[^{}]*"function"\s*:\s*)?\{\s*'
                found = re.match(rf'{start}(?:{key}|"name")\s*:\s*({_STRING})', self.text)
                return None if found is None else _text(found[1])
            case "python" if self._extent.begun:
                return name_before(self.text.lstrip(), self._schemas, _PYTHON, _BEFORE_PYTHON)
            case "named" if self._extent.begun:
                return name_before(self.text.lstrip(), self._schemas)
            case "pairs" if (key := self._marks.first.strip()) in self.text:
                return bare(self.text.partition(key)[0]).strip()
        return self._name

    def calls(self) -> list[ToolCall]:
        """The whole of it; raises `ValueError` if that is not understood in full."""
        match self._kind:
            case "object":
                said = from_json(bare(self.text))
                return [self._object(each) for each in (said if isinstance(said, list) else [said])]
            case "pairs":
                return [self._paired()]
        if not (name := self.name):
            raise ValueError("it has no name")
        text = self.text if self._kind == "headed" else self.text.lstrip().removeprefix(marked(name))
        if self._kind == "python":
            return [ToolCall(name, from_python(bare(text)))]
        before, start, given = text.partition("{")
        if not self._is_frame(before):
            raise ValueError(f"{bare(name + before).strip()!r} is no name of a tool")
        return [self._call(name, from_json(bare(start + given)))]

    def _is_frame(self, text: str) -> bool:
        """Whether this may stand between a name and its arguments: it says nothing that no control token announces."""
        return text.strip() in ("", self._grammar.before_arguments.strip()) or bool(_ANNOUNCED.fullmatch(text))

    def _object(self, said: Any) -> ToolCall:
        """A call in JSON. A key that is not known may hold what it was meant to be called with."""
        if isinstance(said, dict) and isinstance(inside := said.get("function"), dict):
            _require_known(said, {"function", *_HARMLESS})
            said = inside
        if not isinstance(said, dict):
            raise ValueError(f"{said!r} is no call")
        names = {self._grammar.name_key, "name"} & said.keys()
        name = said[names.pop()] if len(names) == 1 else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"it has no {self._grammar.name_key!r}")
        return self._call(name, self._unwrapped(name, said))

    def _unwrapped(self, name: str, said: Mapping[str, Any]) -> Any:
        """What an object holds that says which tool is called, and with what."""
        keys = {self._grammar.arguments_key, *_ARGUMENTS} & said.keys()
        # Without arguments a key that is harmless elsewhere may be one of them.
        auto_reencode = set(_HARMLESS) - (set() if keys else self._fields(name).keys())
        _require_known(said, {*keys, *auto_reencode, self._grammar.name_key, "name"})
        if any(said.get(key, name) != name for key in (self._grammar.name_key, "name")):
            raise ValueError("it names several tools")
        if len(keys) > 1:
            raise ValueError(f"it has arguments in several places: {', '.join(map(repr, sorted(keys)))}")
        given = said[keys.pop()] if keys else {}
        return from_json(given) if isinstance(given, str) else given

    def _call(self, name: str, given: Any) -> ToolCall:
        """A call with arguments; with those inside, if a call, or its arguments under a key, stands in their place."""
        given = self._unwrapped(name, given) if self._is_wrapped(name, given) else given
        if not isinstance(given, dict) or self._is_wrapped(name, given):
            raise ValueError("its arguments are no JSON object")
        return ToolCall(name, given)

    def _is_wrapped(self, name: str, given: Any) -> bool:
        """Tell whether arguments stand under a key that the tool has no argument of."""
        schema, fields = self._schemas.get(name, {}), self._fields(name)
        takes_any = "properties" not in schema or schema.get("additionalProperties")
        keys = given.keys() if isinstance(given, dict) and not takes_any else set[str]()
        return bool(keys & {self._grammar.arguments_key, *_ARGUMENTS}) and not keys & fields.keys()

    def _fields(self, name: str) -> Mapping[str, Any]:
        return self._schemas.get(name, {}).get("properties") or {}

    @property
    def _marks(self) -> PairMarks:
        assert self._grammar.pairs is not None
        return self._grammar.pairs

    def _paired(self) -> ToolCall:
        key, inner, value_end = self._marks.first.strip(), self._marks.inner.strip(), self._marks.value_end
        name, found, rest = self.text.partition(key)
        name, is_frame = bare(name).strip(), has_control(name)
        if is_frame or (name not in self._schemas and not re.fullmatch(r"[\w.-]+", name)):
            raise ValueError("it has no name")
        pairs, rest = list[tuple[str, str]](), found + rest
        pair = re.compile(rf"\s*{re.escape(key)}(.*?){_blanks(inner)}(.*?){re.escape(value_end)}", re.DOTALL)
        while (each := pair.match(rest)) is not None:
            pairs.append((bare(each[1]).strip(), bare(each[2])))
            rest = rest[each.end() :]
        if rest.strip():
            raise ValueError(f"{bare(rest).strip()!r} is no pair of a key and a value")
        fields = self._fields(name)
        return ToolCall(name, unique((key, _typed(value, fields.get(key))) for key, value in pairs))


def name_before(text: str, schemas: Schemas, pattern: str = _NAME, behind: str = _BEFORE) -> str | None:
    """Read a name at the start of marked text: the longest that a tool has, whatever its signs, or what looks like one.

    Args:
        text: It starts with the name.
        schemas: Of the tools.
        pattern: Of what looks like a name.
        behind: What follows a name.
    """
    known = [name for name in schemas if re.match(rf"{re.escape(marked(name))}(?:{behind})", text)]
    found = re.match(rf"({pattern})(?:{behind})", text)
    return max(known, key=len, default=None if found is None else bare(found[1]))


def _require_known(said: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := [key for key in said if key not in known]:
        raise ValueError(f"nobody knows what {unknown[0]!r} means in it")


def _blanks(mark: str) -> str:
    """A mark in which any blanks may stand where it has some."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", mark))


def _typed(value: str, schema: Any) -> Any:
    """A value that is written bare if it is a text, and as JSON otherwise."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return from_json(value)
    except ValueError:
        return value


def _text(quoted: str) -> str | None:
    try:
        return str(from_json(bare(quoted)))
    except ValueError:
        return None
