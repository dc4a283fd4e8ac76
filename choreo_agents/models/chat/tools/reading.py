"""Parses a streamed answer into text and tool calls, by the grammar of the model's family.

Control tokens are marked in the text with private-use characters, so that text that looks like one is not confused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from choreo_agents.models.chat.tools.grammar import (
    BrokenCall,
    CallGrammar,
    CallPart,
    Kind,
    PairMarks,
    TextPart,
    ToolCall,
)
from choreo_agents.models.chat.tools.literals import from_json, to_json, unique
from choreo_agents.models.prompt_text import PromptText

_BEGIN, _END, _ESCAPE = "\ue000", "\ue001", "\ue002"
CONTROL = _BEGIN
"""First character of every control token in marked text."""
_ESCAPED = {ord(sign): f"{_ESCAPE}{chr(ord(sign) + 16)}" for sign in (_BEGIN, _END, _ESCAPE)}
_CONTROL = re.compile(f"{_BEGIN}([^{_END}]*){_END}")
_HIDDEN = re.compile(f"{_ESCAPE}(.)", re.DOTALL)


def mark_text(text: str, *, is_control: bool = False) -> str:
    """Mark a piece: delimit a control token; escape the delimiters in plain text."""
    return f"{_BEGIN}{text}{_END}" if is_control else text.translate(_ESCAPED)


def bare(text: str, hidden: Iterable[str] = ()) -> str:
    """Unmark a text, leaving out some control tokens."""
    left_out = frozenset(hidden)
    text = _CONTROL.sub(lambda match: "" if match[1] in left_out else match[1], text)
    return _HIDDEN.sub(lambda match: chr(ord(match[1]) - 16), text)


def first_control(text: str) -> str:
    """Return the first control token of marked text with its delimiters; "" if there is none."""
    match = _CONTROL.search(text)
    return "" if match is None else match[0]


def find_mark(text: str, mark: str) -> int:
    """Return the first index of a mark in marked text, outside of control tokens; -1 if there is none."""
    if not mark or mark.startswith(_BEGIN):
        return text.find(mark) if mark else -1
    for match in re.finditer(f"{_BEGIN}[^{_END}]*{_END}|({re.escape(mark)})", text):
        if match[1] is not None:
            return match.start()
    return -1


def partial_mark(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may start a mark, or are one."""
    for length in range(min(len(text), len(mark)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


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


class Extent:
    """A finder of the end of a streamed JSON value that starts with a bracket, in marked text."""

    def __init__(self) -> None:
        self.begun = False
        self._is_text = self._escaped = False
        """Two flags of the next character: it is within a string; it is escaped."""
        self._depth = 0
        """Number of open brackets."""

    def take(self, text: str) -> int | None:
        """Add a piece; return how much of it belongs to the value if it ends here.

        Raises `ValueError` at a control token outside of strings, in which it is text.
        """
        for at, sign in enumerate(text, start=1):
            if self._is_text:
                self._is_text = self._escaped or sign != '"'
                self._escaped = not self._escaped and sign == "\\"
            elif sign == '"':
                self._is_text = True
            elif sign in "{[":
                self._depth += 1
                self.begun = True
            elif sign in "}]":
                self._depth -= 1
            elif sign == CONTROL:
                raise ValueError("it is cut off by a control token")
            if self.begun and self._depth <= 0:
                return at
        return None


class CallText:
    """A parser of one streamed call, or of a list of calls; its text is marked.

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
        used = self._extent.take(text[start:])
        return None if used is None else used + start

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


Part = TextPart | CallPart
_MORE = re.compile(r"[,;]?\s*(?:(\{)|$)")
"""Pattern after a JSON object: another object, or a possible start of one."""


class ToolCallReader:
    """A parser of one message, which reads by character, so that the cuts of the stream do not matter.

    A mark that is a control token of the tokenizer must come as that token; the same characters spelled out are text.

    Args:
        grammar: The family's grammar.
        schemas: Schemas of the available tools, by name.
        controls: Texts of all control tokens.
        shown: Those of them that are shown as text.
        opening: Header of the model's turns.
    """

    def __init__(
        self,
        grammar: CallGrammar,
        schemas: Schemas,
        controls: Collection[str] = (),
        shown: Collection[str] = (),
        opening: str = "",
    ) -> None:
        self.words = ""
        self.calls: list[ToolCall | BrokenCall] = []
        pattern = re.compile("|".join(map(re.escape, sorted(filter(None, controls), key=len, reverse=True))) or "(?!)")

        def mark(text: str) -> str:
            runs = PromptText.special(text).runs(pattern)
            return "".join(mark_text(part, is_control=is_control) for part, is_control in runs)

        self._grammar = g = grammar.mapped(mark)
        self._schemas = schemas
        self._hidden = frozenset(controls) - frozenset(shown)
        self._own = mark(opening).strip()
        before = g.before.strip()
        self._opening = "" if grammar.is_bare else first_control(before) or before
        self._lead = before.partition(self._opening)[2].strip() if self._opening else before
        self._close = g.after.strip()
        self._next = "" if g.repeats or g.pairs is not None else g.between.strip()
        if grammar.is_bare and not self._next:
            self._next = ";"
        self._rest = ""
        """Marked text that is not parsed yet."""
        self._is_behind = False
        """Whether no text came since a call: blanks between calls are dropped."""
        self._is_final = False
        self._parts = self._read_turns() if grammar.kind == "headed" else self._read_message()

    def disable_calls(self) -> None:
        """Treat all that follows as text, whatever it looks like."""
        self._opening, self._parts = "", self._read_words()

    def add(self, text: str, *, is_control: bool = False) -> list[Part]:
        """Add a piece; return new text and calls."""
        parts: list[Part] = []
        for sign in [text] if is_control else text:
            self._rest += mark_text(sign, is_control=is_control)
            parts += self._new_parts()
        return _join_text(parts)

    def end(self) -> list[Part]:
        """Finish the message; return the remaining text and calls."""
        self._is_final = True
        return [*self._new_parts()]

    def _new_parts(self) -> Iterator[Part]:
        while (part := next(self._parts, None)) is not None:
            yield part

    # These generators yield parts, and None where they need more text; they need no more once the message is final.

    def _read_message(self) -> Iterator[Part | None]:
        """Read text and calls, in formats whose calls have an opening mark or are the whole message."""
        grammar, is_call, tentative = self._grammar, False, False
        while grammar.is_bare:
            text = self._rest.lstrip()
            opening = next((mark for mark in grammar.may_open if text.startswith(mark)), "")
            tentative = not opening and text.startswith(self._lead or ("{", "["))
            is_call = bool(opening) or tentative
            if is_call or text or self._is_final:
                self._rest = text.removeprefix(opening) if opening else self._rest
                break
            yield None
        while is_call or (yield from self._read_words()):
            yield from self._read_calls(tentative=tentative)
            is_call = tentative = False

    def _read_turns(self) -> Iterator[Part | None]:
        """Read turns whose header says whether they are a call, text, thoughts, or another speaker's."""
        grammar, goes_on = self._grammar, True
        while goes_on:
            while grammar.content not in self._rest:
                if self._is_final:
                    if CONTROL not in self._rest:
                        yield from self._read_words()  # text without a header
                    return
                yield None
            header, mark, self._rest = self._rest.partition(grammar.content)
            start = first_control(self._own)
            while start and header.strip().startswith(start) and not header.strip().startswith(self._own):
                self._rest = ""  # the model invents turns of other speakers: drop them
                yield None
            to, equals, own = grammar.before.strip().rpartition("=")
            _, called, to_whom = header.partition(to + equals)
            is_spoken = not grammar.unspoken or grammar.unspoken not in header
            if called and (name := name_before(to_whom.removeprefix(own), self._schemas)):
                is_spoken = True
                yield from self._read_call(CallText(grammar, self._close, self._schemas, name), header + mark)
            elif is_spoken and self.words.strip():
                self._rest = f"\n\n{self._rest}"
            goes_on = yield from self._read_words(is_spoken=is_spoken)

    def _read_words(self, *, is_spoken: bool = True) -> Generator[Part | None, None, bool]:
        """Read text up to a call or a header; return whether one follows."""
        is_headed = self._grammar.kind == "headed"
        while True:
            text = self._rest
            opening = first_control(text) if is_headed else self._opening
            at = find_mark(text, opening)
            held_count = 0 if self._is_final or at >= 0 else partial_mark(text, opening)
            spoken = text[:at] if at >= 0 else text[: len(text) - held_count]
            is_blank = self._is_behind and not spoken.strip()
            if at >= 0 or self._is_final or not is_blank:
                self._rest = text[len(spoken) :].removeprefix(opening if at >= 0 else "")
                if is_spoken and not is_blank and (visible := bare(spoken, self._hidden)):
                    self.words += visible
                    self._is_behind = False
                    yield TextPart(visible)
                if at >= 0 or self._is_final:
                    return at >= 0
            yield None

    def _read_calls(self, *, tentative: bool) -> Iterator[Part | None]:
        """Read calls that follow each other, the first behind an opening mark; `tentative`: it may still be text."""
        lead, goes_on = self._lead, True
        while goes_on:
            while True:
                text = self._rest.lstrip()
                taken = text.removeprefix(lead)
                if self._is_final or (taken.strip() and (text == lead or not lead.startswith(text))):
                    break
                yield None
            before = self._rest[: len(self._rest) - len(taken)] if tentative else ""
            self._rest = taken
            call = CallText(self._grammar, self._close, self._schemas)
            goes_on = yield from self._read_call(call, before, tentative=tentative)
            lead, tentative = "", False

    def _read_call(self, call: CallText, before: str, *, tentative: bool = False) -> Generator[Part | None, None, bool]:
        """Read a call and what follows it; return whether that is another one. `before`: the marks before it."""
        calls, known = list[ToolCall](), self._schemas
        try:
            used = None
            while used is None:
                text, self._rest = self._rest, ""
                used = call.take(text) if text else None
                if used is not None:
                    self._rest = text[used:]
                    calls = call.calls()
                # The name is looked for in the whole text: only while it decides something, and a call is short.
                names = [] if not tentative else [call.name] if used is None else [made.name for made in calls]
                if any(name is not None and name not in known for name in names):
                    raise ValueError("the tool does not exist")
                if used is None and self._is_final:
                    raise ValueError("the message ends inside it")
                if used is None:
                    yield None
            is_over, rest, goes_on = yield from self._find_next()
            if not is_over:
                raise ValueError("it is followed by other text")
        except ValueError as error:
            self._rest = call.text + self._rest
            if tentative and call.name not in known:
                self._rest = before + self._rest  # it is text after all
                return False
            yield from self._skip_broken(call, before, str(error))
            calls = []
            _, rest, goes_on = yield from self._find_next()
        yield from map(self._emit, calls)
        self._rest, self._is_behind = rest, True
        return goes_on

    def _find_next(self) -> Generator[None, None, tuple[bool, str, bool]]:
        """Find what follows a call; return whether it may follow one, the text behind it, and whether it is a call."""
        is_headed, close = self._grammar.kind == "headed", self._close
        marks = [mark for mark in (self._next, close, self._opening) if mark]
        while True:
            text = self._rest.lstrip()
            more = None if is_headed else _MORE.match(text)
            begun = any(mark.startswith(text) and mark != text for mark in marks) or (more is not None and not more[1])
            if self._is_final or (text and not begun):
                break
            yield None
        if self._next and text.startswith(self._next):
            return True, text.removeprefix(self._next), True
        if more is not None:
            return True, text[more.start(1) :] if more[1] else "", bool(more[1])
        ended = next((mark for mark in (close, first_control(close)) if mark and text.startswith(mark)), "")
        is_over = not text or bool(ended) or text.startswith((CONTROL, *marks)) or not (close or is_headed)
        return is_over, text.removeprefix(ended), False

    def _skip_broken(self, call: CallText, before: str, why: str) -> Iterator[Part | None]:
        """Read to the end of a broken call, and yield it."""
        ends = [mark for mark in (self._close, self._opening) if len(mark) > 1]  # a single bracket may be part of it
        longest, start = max(map(len, ends), default=0), 0
        while True:
            if self._grammar.kind == "headed" and CONTROL in self._rest:
                ends = [first_control(self._rest)]
            places = [at + start for at in (find_mark(self._rest[start:], mark) for mark in ends) if at >= 0]
            if places or self._is_final:
                break
            # Search only what is new: a broken call may be long, and a search from the start would be quadratic.
            start = max(0, len(self._rest) - longest)
            yield None
        at = min(places, default=len(self._rest))
        text = bare(before + self._rest[:at]).strip()
        self._rest = self._rest[at:]
        # Clients that join streamed arguments take text that starts with a brace for an incomplete JSON object.
        text = f"{bare(self._opening) or '<tool_call>'}{text}" if text[:1] in ("", "{") else text
        yield self._emit(BrokenCall(call.name, text, why))

    def _emit(self, call: ToolCall | BrokenCall) -> CallPart:
        self.calls.append(call)
        arguments = call.text if isinstance(call, BrokenCall) else to_json(call.arguments)
        return CallPart(len(self.calls) - 1, call.name, arguments)


def _join_text(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent pieces of text."""
    joined: list[Part] = []
    for run in ([*pieces] for _, pieces in groupby(parts, type)):
        words = [part.text for part in run if isinstance(part, TextPart)]
        joined += [TextPart("".join(words))] if words else run
    return joined
