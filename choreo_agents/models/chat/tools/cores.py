"""One call as it comes: what stands between the marks of a family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from choreo_agents.models.chat.tools.calls import ToolCall
from choreo_agents.models.chat.tools.grammar import CallGrammar, PairMarks
from choreo_agents.models.chat.tools.literals import Extent, from_json, from_python, to_json
from choreo_agents.models.chat.tools.marked import bare, has_control

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by its name."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_BEHIND_NAME = 256
"""Characters between a name and its arguments at most."""


class BrokenCallError(Exception):
    """It cannot become a call."""


class Core(Protocol):
    """Reads one call. Text is marked (see `marked`)."""

    name: str | None
    """Of the tool, once it is known."""
    arguments: str
    """JSON, as far as it has come."""

    def take(self, text: str) -> int | None:
        """The next piece; how much of it belongs to the call if that ends in it. Raises `BrokenCallError`."""
        ...

    def call(self) -> ToolCall:
        """The whole call; raises `ValueError` if it is none."""
        ...


class _Bracketed:
    """Text that ends where its first bracket is closed."""

    def __init__(self, quotes: str = '"') -> None:
        self.text = ""
        self._extent = Extent(quotes)

    def take(self, text: str) -> int | None:
        cut = text.find("\ue000") if not self._extent.is_text else -1
        used = self._extent.take(text if cut < 0 else text[:cut])
        if used is None and cut >= 0:
            if not self._extent.is_text:
                raise BrokenCallError("it is cut off by a control token")
            # The piece before it has opened a string, in which it is text.
            used = self._extent.take(text[cut:])
            used = None if used is None else used + cut
        self.text += text if used is None else text[:used]
        return used

    @property
    def begun(self) -> bool:
        return self._extent.begun


class ObjectCore:
    """`{"name": ..., "arguments": {...}}`"""

    def __init__(self, grammar: CallGrammar) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._grammar = grammar
        self._whole = _Bracketed()
        key, given = (re.escape(to_json(name)) for name in (grammar.name_key, grammar.arguments_key))
        self._start = re.compile(rf"\s*\{{\s*{key}\s*:\s*({_STRING})\s*,\s*{given}\s*:\s*(?=\S)")
        self._named = re.compile(rf"\s*\{{\s*{key}\s*:\s*({_STRING})")
        self._streamed: _Bracketed | None = None
        self._read = 0
        self._done = False

    def take(self, text: str) -> int | None:
        if not self._whole.begun and (first := (self._whole.text + text).lstrip()[:1]) not in ("", "{"):
            raise BrokenCallError(f"it starts with {first!r}, and is no JSON object")
        used = self._whole.take(text)
        self._stream()
        return used

    def _stream(self) -> None:
        """What can be told before the end: name and arguments of an object that has them in this order."""
        written = self._whole.text
        if self.name is None and (named := self._named.match(written)):
            self.name = _text(named[1])
        if self._streamed is None and (start := self._start.match(written)):
            self._streamed, self._read = _Bracketed(), start.end()
            self._done = written[self._read] != "{"
        if self._streamed is not None and not self._done and self._read < len(written):
            new, self._read = written[self._read :], len(written)
            used = self._streamed.take(new)
            self._done = used is not None
            self.arguments += bare(new[:used])

    def call(self) -> ToolCall:
        said = from_json(bare(self._whole.text))
        grammar = self._grammar
        inside = said.get("function")
        said = inside if isinstance(inside, dict) and grammar.name_key not in said else said
        name = said.get(grammar.name_key)
        if not isinstance(name, str) or not name:
            raise ValueError(f"it has no {grammar.name_key!r}")
        self.name = name
        given = said.get(grammar.arguments_key, {})
        return ToolCall(name, _arguments(from_json(given) if isinstance(given, str) else given))


class NamedCore:
    """A name, then a JSON object with the arguments.

    Args:
        name: Of the tool, if it has been read.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.arguments = ""
        self._before = ""
        self._given = _Bracketed()

    def take(self, text: str) -> int | None:
        start = 0
        if not self._given.begun and "{" not in text:
            self._before += text
            if len(self._before) > _BEHIND_NAME:
                raise BrokenCallError("no arguments follow its name")
            return None
        if not self._given.begun:
            start = text.index("{")
            self._before += text[:start]
            if self.name is None:
                self.name = _first_name(self._before)
            elif self._before.strip():
                raise BrokenCallError("its arguments are no JSON object")
        used = self._given.take(text[start:])
        self.arguments += bare(text[start:][:used])
        return None if used is None else used + start

    def call(self) -> ToolCall:
        assert self.name is not None
        return ToolCall(self.name, _arguments(from_json(self.arguments)))


def _first_name(text: str) -> str:
    """The name that a call starts with: up to a control token, a blank or the end of a line."""
    found = re.match(r"\s*([^\s\ue000{]+)", text)
    if found is None:
        raise BrokenCallError("it has no name")
    return bare(found[1])


class PythonCore:
    """`name(key="value")`"""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._whole = _Bracketed("\"'")

    def take(self, text: str) -> int | None:
        if not self._whole.begun and not re.match(r"\s*[^\W\d][\w.]*\s*(\(|$)|\s*$", self._whole.text + text):
            raise BrokenCallError("it is no call of a function")
        used = self._whole.take(text)
        if self.name is None and (found := re.match(r"\s*([\w.]+)\s*\(", self._whole.text)):
            self.name = found[1]
        return used

    def call(self) -> ToolCall:
        self.name, given = from_python(bare(self._whole.text))
        self.arguments = to_json(given)
        return ToolCall(self.name, given)


class PairsCore:
    """A name, and keys and values between marks, up to the mark that closes the call.

    Args:
        marks: What stands around keys and values.
        close: What closes a call; kept for who reads on.
        schemas: Say which values are texts.
    """

    def __init__(self, marks: PairMarks, close: str, schemas: Schemas) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._text = ""
        self._close = close
        self._schemas = schemas
        key, inner = marks.first.strip(), marks.inner.strip()
        self._key = key
        self._pair = re.compile(rf"{re.escape(key)}(.*?){_blanks(inner)}(.*?){re.escape(marks.value_end)}", re.DOTALL)

    def take(self, text: str) -> int | None:
        before = len(self._text)
        self._text += text
        if self.name is None and self._key in self._text:
            self.name = bare(self._text.partition(self._key)[0]).strip()
        end = self._text.find(self._close, max(0, before - len(self._close)))
        if end < 0:
            return None
        self._text = self._text[:end]
        return end - before

    def call(self) -> ToolCall:
        name, _, rest = self._text.partition(self._key)
        self.name = bare(name).strip()
        if not self.name or has_control(name):
            raise ValueError("it has no name")
        given, end = {}, 0
        rest = self._key + rest if rest else ""
        for found in self._pair.finditer(rest):
            if rest[end : found.start()].strip():
                break
            given[bare(found[1]).strip()] = bare(found[2])
            end = found.end()
        if rest[end:].strip():
            raise ValueError(f"{bare(rest[end:]).strip()!r} is no pair of a key and a value")
        fields = self._schemas.get(self.name, {}).get("properties") or {}
        arguments = {key: _typed(value, fields.get(key)) for key, value in given.items()}
        self.arguments = to_json(arguments)
        return ToolCall(self.name, arguments)


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


def _arguments(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError("its arguments are no JSON object")
    return given
