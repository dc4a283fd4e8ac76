"""Parses a streamed answer into text and tool calls, by the grammar of the model's family."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from choreo_agents.models.chat.tools.cores import CallText, Schemas, name_before
from choreo_agents.models.chat.tools.grammar import BrokenCall, CallGrammar, CallPart, TextPart, ToolCall
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.chat.tools.marked import (
    CONTROL,
    bare,
    find_mark,
    first_control,
    mark_special,
    mark_text,
    partial_mark,
)

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
        self._grammar = g = grammar.mapped(lambda text: mark_special(text, controls))
        self._schemas = schemas
        self._hidden = frozenset(controls) - frozenset(shown)
        self._own = mark_special(opening, controls).strip()
        before = g.before.strip()
        self._opening = "" if grammar.is_bare else first_control(before) or before
        self._usual_lead = before.partition(self._opening)[2].strip() if self._opening else before
        self._lead = self._usual_lead
        self._close = g.after.strip()
        self._next = "" if g.repeats or g.pairs is not None else g.between.strip()
        if grammar.is_bare and not self._next:
            self._next = ";"
        self._rest = ""
        """Marked text that is not parsed yet."""
        self._call = CallText(g, self._close, schemas)
        """The call that is being parsed."""
        self._before = self._written = ""
        """The marks before that call, and its text so far."""
        self._whole: list[ToolCall] = []
        """Calls that are complete, but may still be invalidated by what follows."""
        self._state = "header" if grammar.kind == "headed" else "start" if grammar.is_bare else "words"
        self._is_behind = False
        """Whether no text came since a call: blanks between calls are dropped."""
        self._tentative = False
        """Whether what looks like a call may still be text."""
        self._why = ""
        self._searched = 0
        """Characters of `_rest` in which the end of a broken call is not."""

    def disable_calls(self) -> None:
        """Treat all that follows as text, whatever it looks like."""
        self._state, self._opening = "words", ""

    def add(self, text: str, *, is_control: bool = False) -> list[Part]:
        """Add a piece; return new text and calls."""
        parts: list[Part] = []
        for sign in [text] if is_control else text:
            self._rest += mark_text(sign, is_control=is_control)
            parts += self._read(final=False)
        return _join_text(parts)

    def end(self) -> list[Part]:
        """Finish the message; return the remaining text and calls."""
        return list(self._read(final=True))

    def _read(self, *, final: bool) -> Iterator[Part]:
        while True:
            before = (self._state, len(self._rest))
            match self._state:
                case "start":
                    self._read_start(final)
                case "header":
                    self._read_header(final)
                case "words" | "unspoken":
                    yield from self._read_words(final)
                case "lead":
                    self._read_lead(final)
                case "call":
                    self._read_call(final)
                case "broken":
                    yield from self._skip_broken(final)
                case "after":
                    yield from self._read_after(final)
                case "over":
                    self._rest = ""
            if (self._state, len(self._rest)) == before:
                return

    def _read_start(self, final: bool) -> None:
        """Decide whether a message may be a bare call, without an opening mark."""
        text = self._rest.lstrip()
        opening = next((mark for mark in self._grammar.may_open if text.startswith(mark)), "")
        if opening:
            self._rest, self._state = text.removeprefix(opening), "lead"
            return
        if text.startswith(self._lead or ("{", "[")):
            self._tentative, self._state = True, "lead"
        elif text or final:
            self._state = "words"

    def _read_header(self, final: bool) -> None:
        """Decide by a header whether a turn is a call, text, thoughts, or another speaker's."""
        grammar = self._grammar
        header, mark, tail = self._rest.partition(grammar.content)
        if not mark:
            if final and self._rest and CONTROL not in self._rest:
                self._state = "words"  # text without a header
            return
        self._rest = tail
        start = first_control(self._own)
        if start and header.strip().startswith(start) and not header.strip().startswith(self._own):
            self._state = "over"  # the model invents turns of other speakers: drop them
            return
        to, equals, own = grammar.before.strip().rpartition("=")
        _, called, to_whom = header.partition(to + equals)
        if called and (name := name_before(to_whom.removeprefix(own), self._schemas)):
            self._before, self._written, self._state = header + mark, "", "call"
            self._call = CallText(grammar, self._close, self._schemas, name)
        else:
            self._state = "unspoken" if grammar.unspoken and grammar.unspoken in header else "words"
            self._rest = f"\n\n{tail}" if self._state == "words" and self.words.strip() else tail

    def _read_words(self, final: bool) -> Iterator[Part]:
        is_headed, is_spoken = self._grammar.kind == "headed", self._state == "words"
        text = self._rest
        opening = first_control(text) if is_headed else self._opening
        at = find_mark(text, opening)
        held_count = 0 if final or at >= 0 else partial_mark(text, opening)
        spoken = text[:at] if at >= 0 else text[: len(text) - held_count]
        is_blank = self._is_behind and not spoken.strip()
        if is_blank and at < 0 and not final:
            return
        self._rest = text[len(spoken) :].removeprefix(opening if at >= 0 else "")
        if at >= 0:
            self._state = "header" if is_headed else "lead"
        if is_spoken and not is_blank and (visible := bare(spoken, self._hidden)):
            self.words += visible
            self._is_behind = False
            yield TextPart(visible)

    def _read_lead(self, final: bool) -> None:
        """Read the text between the opening mark and the first call."""
        text, lead = self._rest.lstrip(), self._lead
        if lead and lead.startswith(text) and text != lead and not final:
            return
        taken = text.removeprefix(lead) if lead else text
        if not taken.strip() and not final:
            return
        self._before = self._rest[: len(self._rest) - len(taken)] if self._tentative else ""
        self._rest, self._written, self._state = taken, "", "call"
        self._call = CallText(self._grammar, self._close, self._schemas)

    def _read_call(self, final: bool) -> None:
        call, text = self._call, self._rest
        try:
            used = call.take(text) if text else None
            self._written, self._rest = call.text, "" if used is None else text[used:]
            if used is not None:
                self._whole, self._state = call.calls(), "after"
                if self._tentative and any(tool_call.name not in self._schemas for tool_call in self._whole):
                    self._give_up("the tool does not exist")
            elif self._tentative and call.name not in (None, *self._schemas):
                self._give_up("the tool does not exist")
            elif final:
                self._give_up("the message ends inside it")
        except ValueError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """Treat the call as text after all, or as a broken call up to the closing mark."""
        self._rest, self._whole = self._written + self._rest, []
        if self._tentative and self._call.name not in self._schemas:
            self._rest, self._tentative, self._state = self._before + self._rest, False, "words"
        else:
            self._why, self._state = why, "broken"

    def _skip_broken(self, final: bool) -> Iterator[Part]:
        """Read to the end of a broken call, and yield it."""
        ends = [mark for mark in (self._close, self._opening) if len(mark) > 1]  # a single bracket may be part of it
        if self._grammar.kind == "headed" and CONTROL in self._rest:
            ends = [first_control(self._rest)]
        # Search only what is new: a broken call may be long, and a search from the start would be quadratic.
        longest = max(map(len, ends), default=0)
        searched, self._searched = max(0, self._searched - longest), len(self._rest)
        places = [at + searched for at in (find_mark(self._rest[searched:], mark) for mark in ends) if at >= 0]
        if not places and not final:
            return
        at = min(places, default=len(self._rest))
        text = bare(self._before + self._rest[:at]).strip()
        self._rest, self._state, self._tentative, self._searched = self._rest[at:], "after", False, 0
        # Clients that join streamed arguments take text that starts with a brace for an incomplete JSON object.
        text = f"{bare(self._opening) or '<tool_call>'}{text}" if text[:1] in ("", "{") else text
        yield self._emit(BrokenCall(self._call.name, text, self._why))

    def _emit(self, call: ToolCall | BrokenCall) -> CallPart:
        self.calls.append(call)
        arguments = call.text if isinstance(call, BrokenCall) else to_json(call.arguments)
        return CallPart(len(self.calls) - 1, call.name, arguments)

    def _read_after(self, final: bool) -> Iterator[Part]:
        """Decide what follows a call: another one, the closing mark, or text that breaks it."""
        text, close = self._rest.lstrip(), self._close
        marks = [mark for mark in (self._next, close, self._opening) if mark]
        more = None if self._grammar.kind == "headed" else _MORE.match(text)
        begun = any(mark.startswith(text) and mark != text for mark in marks) or (more is not None and not more[1])
        if not final and (not text or begun):
            return
        ended = next((mark for mark in (close, first_control(close)) if mark and text.startswith(mark)), "")
        has_next = bool(self._next) and text.startswith(self._next)
        is_over = not text or has_next or ended or more or text.startswith((CONTROL, *marks))
        if self._whole and not is_over and (close or self._grammar.kind == "headed"):
            self._give_up("it is followed by other text")
            return
        yield from map(self._emit, self._whole)
        self._whole, self._tentative, self._is_behind = [], False, True
        if has_next or (more is not None and more[1]):
            self._rest = text.removeprefix(self._next) if has_next else text[more.start(1) :]  # type: ignore[union-attr]
            self._state, self._lead = "lead", ""
        else:
            self._rest = "" if more is not None else text.removeprefix(ended)
            self._state, self._lead = "words", self._usual_lead


def _join_text(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent pieces of text."""
    joined: list[Part] = []
    for run in ([*pieces] for _, pieces in groupby(parts, type)):
        words = [part.text for part in run if isinstance(part, TextPart)]
        joined += [TextPart("".join(words))] if words else run
    return joined
