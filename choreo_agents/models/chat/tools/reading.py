"""Reads what a model says as it comes: words, and calls of tools in its family's grammar."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from choreo_agents.models.chat.tools.cores import BrokenCallError, CallText, Schemas, name_before
from choreo_agents.models.chat.tools.grammar import BrokenCall, CallGrammar, CallPart, TextPart, ToolCall
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.chat.tools.marked import (
    CONTROL,
    bare,
    find_mark,
    first_control,
    has_control,
    held_back,
    marked,
    marked_frame,
)

Heard = TextPart | CallPart
_MORE = re.compile(r"[,;]?\s*(?:(\{)|$)")
"""Behind a JSON object: another one, or what may be before one."""


class ToolCallReader:
    """Of one message: it reads sign by sign, so that it says the same wherever its pieces are cut.

    A control token counts as a mark where the tokenizer has one for it; the same letters spelled out are words.

    Args:
        grammar: The family's.
        schemas: Of the tools that there are.
        controls: All texts that are control tokens.
        shown: Those of them that are read like words.
        opening: What a turn of the model's starts with.
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
        self._grammar = g = grammar.mapped(lambda text: marked_frame(text, controls))
        self._schemas = schemas
        self._hidden = frozenset(controls) - frozenset(shown)
        self._own = marked_frame(opening, controls).strip()
        before = g.before.strip()
        self._opening = "" if grammar.is_bare else first_control(before) or before
        self._usual_lead = before.partition(self._opening)[2].strip() if self._opening else before
        self._lead = self._usual_lead
        self._close = g.after.strip()
        self._next = "" if g.repeats or g.pairs is not None else g.between.strip()
        if grammar.is_bare and grammar.kind == "object" and not self._next:
            self._next = ";"
        self._rest = ""
        """What is not understood yet."""
        self._call = CallText(g, self._close, schemas)
        """The call that is being read, ..."""
        self._before = self._written = ""
        """... what stands before it and is no words, and what has come of it; ..."""
        self._whole: list[ToolCall] = []
        """... or those that have been read, before it is known whether anything makes nonsense of them."""
        self._state = "header" if grammar.kind == "headed" else "start" if grammar.is_bare else "words"
        self._is_behind = False
        """Whether nothing was said since a call: of blanks between calls nobody is told."""
        self._tentative = False
        """Whether what looks like a call may still be words."""
        self._why = ""
        self._searched = 0
        """How far it is known that what is broken does not end."""

    def only_words(self) -> None:
        """What follows calls nothing, whatever it looks like."""
        self._state, self._opening = "words", ""

    def add(self, text: str, *, is_control: bool = False) -> list[Heard]:
        """The next piece; what is new of words and calls."""
        heard: list[Heard] = []
        for sign in [text] if is_control else text:
            self._rest += marked(sign, is_control=is_control)
            heard += self._read(final=False)
        return _joined(heard)

    def end(self) -> list[Heard]:
        """Nothing follows."""
        return list(self._read(final=True))

    def _read(self, *, final: bool) -> Iterator[Heard]:
        while True:
            before = (self._state, len(self._rest))
            match self._state:
                case "start":
                    self._start(final)
                case "header":
                    self._header(final)
                case "words" | "unspoken":
                    yield from self._read_words(final)
                case "lead":
                    self._begin(final)
                case "call":
                    self._read_call(final)
                case "broken":
                    yield from self._skip(final)
                case "after":
                    yield from self._after(final)
                case "over":
                    self._rest = ""
            if (self._state, len(self._rest)) == before:
                return

    def _start(self, final: bool) -> None:
        """Of calls that nothing has to stand before: whether the message may be one."""
        text = self._rest.lstrip()
        opening = next((mark for mark in self._grammar.may_open if text.startswith(mark)), "")
        if opening:
            self._rest, self._state = text.removeprefix(opening), "lead"
            return
        if text.startswith(self._lead or ("{", "[")):
            self._tentative, self._state = True, "lead"
        elif text or final:
            self._state = "words"

    def _header(self, final: bool) -> None:
        """What a turn is: a call, words, or neither."""
        grammar = self._grammar
        header, found, rest = self._rest.partition(grammar.content)
        if not found:
            if final and self._rest and not has_control(self._rest):
                self._state = "words"  # it speaks without saying what that is
            return
        self._rest = rest
        start = first_control(self._own)
        if start and header.strip().startswith(start) and not header.strip().startswith(self._own):
            self._state = "over"  # the model invents what others say: nothing of that is the model's
            return
        to, equals, own = grammar.before.strip().rpartition("=")
        _, called, to_whom = header.partition(to + equals)
        if called and (name := name_before(to_whom.removeprefix(own), self._schemas)):
            self._before, self._written, self._state = header + found, "", "call"
            self._call = CallText(grammar, self._close, self._schemas, name)
        else:
            self._state = "unspoken" if grammar.unspoken and grammar.unspoken in header else "words"
            self._rest = f"\n\n{rest}" if self._state == "words" and self.words.strip() else rest

    def _read_words(self, final: bool) -> Iterator[Heard]:
        is_headed, is_spoken = self._grammar.kind == "headed", self._state == "words"
        text = self._rest
        opening = first_control(text) if is_headed else self._opening
        at = find_mark(text, opening)
        kept = 0 if final or at >= 0 else held_back(text, opening)
        said = text[:at] if at >= 0 else text[: len(text) - kept]
        is_blank = self._is_behind and not said.strip()
        if is_blank and at < 0 and not final:
            return
        self._rest = text[len(said) :].removeprefix(opening if at >= 0 else "")
        if at >= 0:
            self._state = "header" if is_headed else "lead"
        if is_spoken and not is_blank and (told := bare(said, self._hidden)):
            self.words += told
            self._is_behind = False
            yield TextPart(told)

    def _begin(self, final: bool) -> None:
        """What stands between the mark of calls and the first of them."""
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
                if self._tentative and any(each.name not in self._schemas for each in self._whole):
                    self._give_up("there is no such tool")
            elif self._tentative and call.name not in (None, *self._schemas):
                self._give_up("there is no such tool")
            elif final:
                self._give_up("the message ends within it")
        except (BrokenCallError, ValueError) as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """It is no call: words after all, or something broken up to where calls end."""
        self._rest, self._whole = self._written + self._rest, []
        if self._tentative and self._call.name not in self._schemas:
            self._rest, self._tentative, self._state = self._before + self._rest, False, "words"
        else:
            self._why, self._state = why, "broken"

    def _skip(self, final: bool) -> Iterator[Heard]:
        """What is written of a broken call."""
        ends = [mark for mark in (self._close, self._opening) if len(mark) > 1]  # a bracket may stand in it
        if self._grammar.kind == "headed" and has_control(self._rest):
            ends = [first_control(self._rest)]
        # What has been searched before is not searched again: what is broken may be long.
        longest = max(map(len, ends), default=0)
        known, self._searched = max(0, self._searched - longest), len(self._rest)
        found = [at + known for at in (find_mark(self._rest[known:], mark) for mark in ends) if at >= 0]
        if not found and not final:
            return
        at = min(found, default=len(self._rest))
        text = bare(self._before + self._rest[:at]).strip()
        self._rest, self._state, self._tentative, self._searched = self._rest[at:], "after", False, 0
        # Whoever adds up the pieces of a stream takes what starts like an object for one that is not yet whole.
        text = f"{bare(self._opening) or '<tool_call>'}{text}" if text[:1] in ("", "{") else text
        yield self._heard(BrokenCall(self._call.name, text, self._why))

    def _heard(self, call: ToolCall | BrokenCall) -> CallPart:
        self.calls.append(call)
        said = call.text if isinstance(call, BrokenCall) else to_json(call.arguments)
        return CallPart(len(self.calls) - 1, call.name, said)

    def _after(self, final: bool) -> Iterator[Heard]:
        """What stands behind a call: another one, the mark that calls are over, or what makes nonsense of it."""
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
            self._give_up("something else follows it")
            return
        yield from map(self._heard, self._whole)
        self._whole, self._tentative, self._is_behind = [], False, True
        if has_next or (more is not None and more[1]):
            self._rest = text.removeprefix(self._next) if has_next else text[more.start(1) :]  # type: ignore[union-attr]
            self._state, self._lead = "lead", ""
        else:
            self._rest = "" if more is not None else text.removeprefix(ended)
            self._state, self._lead = "words", self._usual_lead


def _joined(heard: Iterable[Heard]) -> list[Heard]:
    """Return the same pieces, with words that follow each other joined into one."""
    made: list[Heard] = []
    for run in ([*pieces] for _, pieces in groupby(heard, type)):
        words = [each.text for each in run if isinstance(each, TextPart)]
        made += [TextPart("".join(words))] if words else run
    return made
