"""What leads a decode, and what its tokens say: texts to stop at, answers that are allowed, thoughts before them.

Answers of models that think are encoded for their readers:

decoded    header of thoughts | thoughts . . | close | answer . . | end       confidential, its speaker's
encoded    header of an answer                       | answer . . | end       what the call returns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

from choreo_agents.engine.calls import Decode, Guided, Prefill, Thinking
from choreo_agents.engine.messages.message import Message, thinker
from choreo_agents.errors import GrammarError, GuideError, InvalidRequestError
from choreo_agents.models import FramedText, LoadedModel, MakeGuide
from choreo_agents.sampling import (
    BLANK_LINES,
    AnswerGuide,
    AnswerPaths,
    FreeAnswer,
    Grammar,
    Guide,
    GuidedAnswer,
    Phase,
    Sampling,
    ThoughtsGuide,
    TokenGuide,
)
from choreo_agents.sampling.guiding.answers import Path

_INCOMPLETE = "\ufffd"
_LINE_ENDS = ("\n", "\n\n", "\r\n", "\n\n\n")


class Detokenizer:
    """Adds up the tokens of one message and tells what each adds to its text.

    A character may take several tokens: its text comes with the last of them. Special tokens add nothing, unless
    `special` says so.
    """

    def __init__(self, model: LoadedModel, *, special: bool = False) -> None:
        self._model = model
        self._special = special
        self._tokens: list[int] = []
        """From the last one on that said something by itself: it decides the spacing of what follows."""
        self._shown = ""
        """What has been told of their text."""
        self.whole = True
        """Whether no character is incomplete."""

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        text = self._model.decode(self._tokens, special=self._special)
        whole = text.rstrip(_INCOMPLETE)
        self.whole = whole == text
        added = whole[len(self._shown) :]
        if not added:
            return ""
        self._shown = whole
        last = self._model.decode(self._tokens[-1:], special=self._special)
        if self.whole and _INCOMPLETE not in last:
            self._tokens, self._shown = self._tokens[-1:], last
        return added


class TextStop:
    """Watches the text of one answer for any of some texts to stop at."""

    def __init__(self, model: LoadedModel, texts: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(model)
        self._texts = texts
        self._longest = max(len(text) for text in texts)
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        """Add the next token; whether one of the texts is complete with it."""
        added = self._detokenizer.add(token)
        seen = self._tail + added
        self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else ""
        return any(text in seen for text in self._texts)


class TextEnd:
    """Watches whether the text of one answer, with special tokens or without, ends with a given one.

    With `lines`, the token that completes it may go on with ends of lines: many tokenizers write `>` and those that
    follow as one.
    """

    def __init__(self, model: LoadedModel, text: str, *, special: bool = False, lines: bool = False) -> None:
        self.behind = ""
        """The ends of lines that the last token has."""
        self._detokenizer = Detokenizer(model, special=special)
        self._text = text
        self._lines = lines
        self._tail = ""

    def complete(self, token: int) -> bool:
        """Add the next token; whether the text ends with it, and with no part of another character."""
        seen = self._tail + self._detokenizer.add(token)
        bare = seen.rstrip("\r\n") if self._lines and not seen.endswith(self._text) else seen
        self.behind = seen[len(bare) :]
        self._tail = seen[-len(self._text) :]
        return self._detokenizer.whole and bare.endswith(self._text)


def answer_paths(model: LoadedModel, sampling: Sampling, ends: frozenset[int]) -> AnswerPaths | None:
    """What a decode may sample; None if its answers are not constrained.

    Args:
        model: Whose tokens they are.
        sampling: Its `choices`, `lead` and `max_tokens`.
        ends: Tokens that stop the decode or start its closing; if there are none, the model's own end tokens are.

    Raises:
        InvalidRequestError: A text cannot be written in tokens that hold no end, `max_tokens` is too small, or a choice
            starts another and no token can end it.
    """
    if not sampling.choices or sampling.forced is not None:
        return None
    adapter = model.adapter
    ends = frozenset(token for token in ends or adapter.end_tokens if 0 <= token < adapter.vocabulary_size)
    banned = ends | frozenset(adapter.end_tokens)
    choices = frozenset(path for choice in sampling.choices for path in _paths(model, choice, "choice", banned))
    lead = _paths(model, sampling.lead, "lead", banned) if sampling.lead else frozenset()
    paths = AnswerPaths(choices, lead, ends, sampling.max_tokens)
    if paths.needed > sampling.max_tokens:
        raise InvalidRequestError(
            f"the lead and the longest choice take up to {paths.needed} tokens, max_tokens is {sampling.max_tokens!r}: "
            "raise it, or shorten them"
        )
    if not ends and paths.is_ambiguous():
        raise InvalidRequestError(
            f"one of the choices {sampling.choices!r} starts another, and no token can say that it ends there: "
            "give stop_tokens"
        )
    return paths


def answer_guide(model: LoadedModel, sampling: Sampling, paths: AnswerPaths) -> AnswerGuide:
    """Leads one decode along these paths."""
    if not paths.lead:
        return AnswerGuide(paths)
    stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
    return AnswerGuide(paths, TextEnd(model, sampling.lead).complete, stop)


def _paths(model: LoadedModel, text: str, what: str, banned: frozenset[int]) -> frozenset[Path]:
    """The tokens of a text with and without a space before it.

    Headers end without a space, which most tokenizers write as part of the next word and some add by themselves.
    """
    written: dict[Path, str] = {}
    for spelled in (text, f" {text}"):
        try:
            path = tuple(model.encode(FramedText.words(spelled)))
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(f"the {what} {text!r} cannot be tokenized: {error}") from error
        if path:
            written[path] = model.decode(list(path), special=False)
    # Special tokens have no text: a path with one of them says something else, as does one that was normalised.
    size = model.adapter.vocabulary_size
    faithful = [path for path, said in written.items() if said.endswith(text) and max(path) < size]
    if not faithful:
        raise InvalidRequestError(
            f"the {what} {text!r} cannot be written: its tokens say {sorted(written.values())!r}; "
            "give a text without special tokens that the tokenizer leaves as it is"
        )
    kept = frozenset(path for path in faithful if banned.isdisjoint(path))
    if not kept:
        raise InvalidRequestError(
            f"the {what} {text!r} cannot be written: it holds a token that ends the message; "
            "leave it out, or choose other stop_tokens or another closing"
        )
    return kept


@dataclass(frozen=True)
class LedAnswer:
    """Leads the answers of a call, each by a guide of its own."""

    longest: int
    """Tokens that are sampled at most."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    make: Callable[[], Guide]
    """The guide of a new answer."""


def led_answer(
    model: LoadedModel, call: Decode, stops: frozenset[int], compiled: Callable[[Grammar], MakeGuide]
) -> LedAnswer | None:
    """What leads the answers of a call; None: nothing, or its tokens are forced.

    Args:
        model: Whose tokens they are.
        call: Says what is allowed, at most once.
        stops: Tokens that stop the decode or start its closing; if there are none, the model's own end tokens do.
        compiled: Makes guides of a grammar.

    Raises:
        GrammarError: Its sampling's guide cannot be followed, and it is told why.
        InvalidRequestError: It says twice what is allowed, or what cannot be; the extra `guided` is missing.
    """
    if call.guide is not None:
        _require_alone(call.guide, call.sampling)
    return None if call.sampling.forced is not None else _led(model, call, stops, compiled)


def ends_replay(
    model: LoadedModel,
    call: Decode,
    stops: frozenset[int],
    compiled: Callable[[Grammar], MakeGuide],
    answer: Sequence[int],
) -> bool:
    """Whether an answer that a call replays was ended by the call's guide, and not by `max_tokens`.

    Args:
        model: Whose tokens they are.
        call: Has the guide.
        stops: As for `led_answer`.
        compiled: As for `led_answer`.
        answer: The tokens, without thoughts.
    """
    sampling = call.sampling
    if len(answer) < sampling.max_tokens or (call.guide is None and sampling.guide is None):
        return False
    try:
        led = _led(model, call, stops, compiled)
        assert led is not None
        guide = led.make()
        for number, token in enumerate(answer, start=1):
            guide.take(token)
            if guide.done:
                return number == len(answer) and not guide.cut
    except (GrammarError, GuideError):
        pass  # Whatever is forced is taken as it is.
    return False


def _led(
    model: LoadedModel, call: Decode, stops: frozenset[int], compiled: Callable[[Grammar], MakeGuide]
) -> LedAnswer | None:
    """See `led_answer`; of an answer that is really sampled."""
    sampling = call.sampling
    paths = answer_paths(model, sampling, stops)
    if paths is not None:
        return LedAnswer(paths.longest, paths.ends, partial(answer_guide, model, sampling, paths))
    own = call.guide
    ends = frozenset(t for t in stops or model.adapter.end_tokens if 0 <= t < model.adapter.vocabulary_size)
    make: Callable[[], TokenGuide]
    if own is not None:
        make = partial(own.make, model, ends)
    elif sampling.guide is not None:
        make = partial(compiled(sampling.guide), ends)
    else:
        return None

    def guide() -> Guide:
        stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
        size, text = model.adapter.vocabulary_size, partial(model.decode, special=False)
        may_be_cut = own is not None and own.may_be_cut
        return GuidedAnswer(make(), sampling.max_tokens, ends, size, text, stop, may_be_cut=may_be_cut)

    return LedAnswer(sampling.max_tokens, ends, guide)


def _require_alone(guide: Guided, sampling: Sampling) -> None:
    if not (isinstance(guide, Guided) and isinstance(guide.key, str) and guide.key and callable(guide.make)):
        raise InvalidRequestError(f"guide must be a Guided with a key and a function, not {guide!r}")
    if sampling.choices or sampling.guide is not None:
        raise InvalidRequestError(
            f"the guide {guide.key!r} and the sampling both say what the answer is: leave choices and guide out of it"
        )


class ThoughtsReader:
    """Tells of one message's sampled tokens which are thoughts, which the answer, and which stand in between."""

    def __init__(self, model: LoadedModel, thinking: Thinking) -> None:
        self._model = model
        self._end = TextEnd(model, thinking.end, special=True, lines=True)
        self._after = thinking.after
        self._phase: Phase = "thoughts"
        self._left: tuple[int, ...] = ()
        self._blank_lines = 0

    def add(self, token: int) -> Phase:
        """The phase of the next token."""
        if self._phase == "thoughts":
            if self._end.complete(token):
                said = self._end.behind
                while not self._after.text.startswith(said):
                    said = said[:-1]
                self._phase, self._left = "close", tuple(self._model.encode(self._after.removeprefix(said)))
                return "close"
            return "thoughts"
        if self._left and token == self._left[0]:
            self._left = self._left[1:]
            return "close"
        if self._phase == "close" and self._blank_lines < BLANK_LINES and self._is_blank(token):
            self._blank_lines += 1
            return "close"
        self._phase, self._left = "answer", ()
        return "answer"

    def _is_blank(self, token: int) -> bool:
        return self._model.decode([token]).strip(" \t") in _LINE_ENDS

    @property
    def rest(self) -> tuple[int, ...]:
        """What is still to come before the answer, once the thoughts are over; empty before."""
        return self._left

    def answer_in(self, sampled: Sequence[int]) -> int | None:
        """Where among all sampled tokens the answer starts; None if the thoughts never end."""
        phases = [self.add(token) for token in sampled]
        if self._phase == "thoughts":
            return None
        return phases.index("answer") if "answer" in phases else len(phases)


def thoughts_in(model: LoadedModel, thinking: Thinking | None, sampled: Sequence[int]) -> int:
    """How many of these tokens come before an answer; none, if the thoughts never end."""
    return 0 if thinking is None else ThoughtsReader(model, thinking).answer_in(sampled) or 0


def close_of(model: LoadedModel, thinking: Thinking) -> tuple[int, ...]:
    """All that a model that has thought for long enough is made to say before it answers."""
    # In two parts, as a model that ends its thoughts by itself is made to say the second of them.
    return (*model.encode(FramedText.frame(thinking.before + thinking.end)), *model.encode(thinking.after))


def longest_thoughts(model: LoadedModel, thinking: Thinking) -> int:
    """Tokens that thoughts and all that stands between them and the answer can take."""
    return (0 if thinking.counts else thinking.budget) + len(close_of(model, thinking)) + BLANK_LINES


def thoughts_guide(
    model: LoadedModel, sampling: Sampling, thinking: Thinking, stops: frozenset[int], led: LedAnswer | None
) -> ThoughtsGuide:
    """Leads one decode through its thoughts to an answer.

    Args:
        model: Whose tokens they are.
        sampling: Of the answer.
        thinking: How it thinks.
        stops: Tokens that end a message.
        led: What leads the answer; None: nothing.
    """
    if led is None:
        stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
        answer: Guide = FreeAnswer(sampling.max_tokens, stops, stop)
    else:
        answer = led.make()
    total = sampling.max_tokens if thinking.counts else None
    budget = thinking.budget if total is None else min(thinking.budget, total)
    return ThoughtsGuide(budget, close_of(model, thinking), stops, ThoughtsReader(model, thinking), answer, total)


class PhaseTexts:
    """The text of one message's tokens as they come, with the phase that each of them belongs to."""

    def __init__(self, model: LoadedModel, thinking: Thinking | None) -> None:
        self._model = model
        self._reader = None if thinking is None else ThoughtsReader(model, thinking)
        self._phase: Phase = "answer" if thinking is None else "thoughts"
        self._detokenizer = Detokenizer(model)

    def add(self, token: int) -> tuple[Phase, str]:
        """The next token's; what stands between thoughts and answer has no text."""
        phase = self._phase if self._reader is None else self._reader.add(token)
        if phase != self._phase:
            self._phase, self._detokenizer = phase, Detokenizer(self._model)
        return phase, "" if phase == "close" else self._detokenizer.add(token)


def thinks(call: Prefill | Decode) -> TypeGuard[Decode]:
    """Whether a call thinks before it answers."""
    return isinstance(call, Decode) and call.thinking is not None


def thought_out(call: Decode) -> Decode:
    """The call that decodes thoughts and answer: nobody is given what it makes."""
    return replace(call, author=None if call.author is None else thinker(call.author))


def answer_of(model: LoadedModel, call: Decode, thought: Message) -> Prefill:
    """The answer alone, encoded for its readers in the place that it was thought out in.

    Args:
        model: Has decoded it.
        call: Which has thinking.
        thought: What was decoded for the call.
    """
    assert call.thinking is not None
    start = thought.native_offset
    spoken = thought.tokens[thought.header + answer_at(model, call.thinking, thought) :]
    return Prefill(
        [*model.encode(call.thinking.answer), *spoken],
        [parent.handle for parent in thought.parents],
        [start + offset for offset in thought.relative_offsets],
        start,
        author=call.author,
        role="assistant",
        confidential=call.confidential,
        adapter=call.adapter,
        priority=call.priority,
        timeout_s=call.timeout_s,
    )


def answer_at(model: LoadedModel, thinking: Thinking, message: Message) -> int:
    """Where among the sampled tokens of thoughts and answer the answer starts."""
    return thoughts_in(model, thinking, [each.token for each in message.chosen or ()])
