"""Reads what a model says as it comes: words, and calls of tools in its family's grammar."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from choreo_agents.models.chat.tools.calls import BrokenCall, CallPart, SaidWords, ToolCall
from choreo_agents.models.chat.tools.cores import (
    BrokenCallError,
    Core,
    NamedCore,
    ObjectCore,
    PairsCore,
    PythonCore,
    Schemas,
)
from choreo_agents.models.chat.tools.grammar import CallGrammar
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.chat.tools.marked import (
    bare,
    find_mark,
    first_control,
    has_control,
    held_back,
    marked,
    marked_frame,
)

Heard = SaidWords | CallPart


class ToolCallReader:
    """Of one message: told its pieces, wherever they are cut, it says the same.

    A control token counts as a mark where the tokenizer has one for it; the same letters spelled out are words.

    Args:
        grammar: The family's.
        schemas: Of the tools that there are.
        controls: All texts that are control tokens.
        shown: Those of them that are read like words.
    """

    def __init__(
        self,
        grammar: CallGrammar,
        schemas: Schemas,
        controls: Collection[str] = (),
        shown: Collection[str] = (),
    ) -> None:
        self.words = ""
        self.calls: list[ToolCall | BrokenCall] = []
        self._grammar = g = grammar.mapped(lambda text: marked_frame(text, controls))
        self._schemas = schemas
        self._hidden = frozenset(controls) - frozenset(shown)
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
        self._core: Core | None = None
        self._written = ""
        """Of the call that is being read."""
        self._told = (False, 0)
        """Whether its name was shown, and how much of its arguments."""
        self._state = "header" if grammar.kind == "headed" else "start" if grammar.is_bare else "words"
        self._tentative = False
        """Whether what looks like a call may still be words."""
        self._why = ""

    def add(self, text: str, *, is_control: bool = False) -> list[Heard]:
        """The next piece; what is new of words and calls."""
        self._rest += marked(text, is_control=is_control)
        return list(self._read(final=False))

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
                    yield from self._read_call(final)
                case "broken":
                    self._skip(final)
                case "after":
                    self._after(final)
            if (self._state, len(self._rest)) == before:
                return

    def _start(self, final: bool) -> None:
        """Of calls that nothing has to stand before: whether the message may be one."""
        text = self._rest.lstrip()
        opening = next((mark for mark in self._grammar.may_open if text.startswith(mark)), "")
        if opening:
            self._rest, self._state = text.removeprefix(opening), "lead"
            return
        first = self._lead or "{"
        if text.startswith(first):
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
        called = re.search(rf"{re.escape(grammar.before.strip())}([\w.\-]+)", header)
        if called is not None:
            self._core, self._written, self._told = NamedCore(called[1]), "", (False, 0)
            self._state = "call"
        else:
            self._state = "unspoken" if grammar.unspoken and grammar.unspoken in header else "words"

    def _read_words(self, final: bool) -> Iterator[Heard]:
        is_headed, is_spoken = self._grammar.kind == "headed", self._state == "words"
        text = self._rest
        opening = first_control(text) if is_headed else self._opening
        at = find_mark(text, opening)
        kept = 0 if final or at >= 0 else held_back(text, opening)
        said = text[:at] if at >= 0 else text[: len(text) - kept]
        if not said.strip() and self.calls and at < 0 and not final:
            return  # of blanks between calls nobody is told
        self._rest = text[len(said) :].removeprefix(opening if at >= 0 else "")
        if at >= 0:
            self._state = "header" if is_headed else "lead"
        if is_spoken and (said.strip() or not self.calls) and (told := bare(said, self._hidden)):
            self.words += told
            yield SaidWords(told)

    def _begin(self, final: bool) -> None:
        """What stands between the mark of calls and the first of them."""
        text, lead = self._rest.lstrip(), self._lead
        if lead and lead.startswith(text) and text != lead and not final:
            return
        taken = text.removeprefix(lead) if lead else text
        if not taken.strip() and not final:
            return
        self._written = self._rest[: len(self._rest) - len(taken)] if self._tentative else ""
        self._rest, self._told = taken, (False, 0)
        self._core, self._state = self._new_core(), "call"

    def _new_core(self) -> Core:
        grammar = self._grammar
        if grammar.kind == "object":
            return ObjectCore(grammar)
        if grammar.kind == "python":
            return PythonCore()
        if grammar.pairs is not None:
            return PairsCore(grammar.pairs, self._close, self._schemas)
        return NamedCore()

    def _read_call(self, final: bool) -> Iterator[Heard]:
        core, text = self._core, self._rest
        assert core is not None
        try:
            used = core.take(text) if text else None
        except BrokenCallError as error:
            self._give_up(str(error))
            return
        written = self._written + text
        # What closes it may have begun in what came before.
        end = len(written) if used is None else len(self._written) + used
        self._written, self._rest = written[:end], written[end:]
        if used is not None:
            yield from self._finish(core)
        elif self._tentative and core.name is not None and core.name not in self._schemas:
            self._give_up("there is no such tool")
        else:
            yield from self._stream(core)
            if final:
                self._cut_off()

    def _stream(self, core: Core) -> Iterator[Heard]:
        """What is new of a call that goes on."""
        named, shown = self._told
        if core.name is None or (self._tentative and not core.arguments):
            return
        self._tentative = False
        if not named or len(core.arguments) > shown:
            self._told = (True, len(core.arguments))
            yield CallPart(len(self.calls), None if named else core.name, core.arguments[shown:])

    def _finish(self, core: Core) -> Iterator[Heard]:
        try:
            call = core.call()
        except ValueError as error:
            if not self._tentative:
                self._state = "after"
                self._break(str(error))
            else:
                self._give_up(str(error))
            return
        if self._tentative and call.name not in self._schemas:
            self._give_up("there is no such tool")
            return
        self._tentative = False
        core.arguments = core.arguments or to_json(call.arguments)
        yield from self._stream(core)
        self.calls.append(call)
        self._core, self._written, self._state = None, "", "after"

    def _give_up(self, why: str) -> None:
        """It is no call: words after all, or something broken up to where calls end."""
        if self._tentative:
            self._rest, self._core = self._written + self._rest, None
            self._tentative, self._written, self._state = False, "", "words"
            return
        self._why, self._state = why, "broken"

    def _skip(self, final: bool) -> None:
        """What is written of a broken call."""
        ends = [self._close, self._opening]
        if self._grammar.kind == "headed" and has_control(self._rest):
            ends = [first_control(self._rest)]
        found = [at for at in (find_mark(self._rest, mark) for mark in ends) if at >= 0]
        if not found and not final:
            return
        at = min(found, default=len(self._rest))
        self._written, self._rest, self._state = self._written + self._rest[:at], self._rest[at:], "after"
        self._break(self._why)

    def _cut_off(self) -> None:
        """The message ends within a call: where a mark closes it, it was never whole."""
        why = "the message ends within it"
        if self._tentative:
            self._give_up(why)
            return
        at = find_mark(self._written, self._close)
        if at >= 0:
            self._written, self._rest = self._written[:at], self._written[at:]
        self._state = "after"
        self._break(why)

    def _break(self, why: str) -> None:
        name = None if self._core is None else self._core.name
        self.calls.append(BrokenCall(name, bare(self._written).strip(), why))
        self._core, self._written = None, ""

    def _after(self, final: bool) -> None:
        """What stands behind a call: another one, or the mark that calls are over."""
        text = self._rest.lstrip()
        marks = [mark for mark in (self._next, self._close) if mark]
        if not final and (not text or any(mark.startswith(text) and mark != text for mark in marks)):
            return
        if self._next and text.startswith(self._next):
            self._rest, self._state, self._lead = text.removeprefix(self._next), "lead", ""
            return
        if self._close and text.startswith(self._close):
            self._rest = text.removeprefix(self._close)
        self._state, self._lead = "words", self._usual_lead
