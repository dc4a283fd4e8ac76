"""Constraints on decodes and readers of their tokens: stop texts, allowed answers, and thoughts before them.

Answers of models that think are encoded again for their readers:

decoded    header of thoughts | thoughts . . | close | answer . . | end       confidential, its author's
encoded    header of an answer                       | answer . . | end       what the call returns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from choreo_agents.engine.calls import Constraint, Decode, Prefill, Thinking
from choreo_agents.engine.messages.message import Message
from choreo_agents.errors import ConstraintError, GrammarError, InvalidRequestError
from choreo_agents.models import LoadedModel, MakeConstraint, PromptText
from choreo_agents.sampling import (
    BLANK_LINES,
    AnswerConstraint,
    AnswerPaths,
    ChoiceConstraint,
    ConstrainedAnswer,
    FreeAnswer,
    Grammar,
    Phase,
    Sampling,
    ThinkingConstraint,
    TokenConstraint,
)
from choreo_agents.sampling.constraints import Path

_INCOMPLETE = "\ufffd"
_LINE_ENDS = ("\n", "\n\n", "\r\n", "\n\n\n")


class Detokenizer:
    """Detokenizer of one message, which returns the text that each token adds.

    A character may take several tokens: its text comes with the last of them. Special tokens add nothing, unless
    `special` is set.
    """

    def __init__(self, model: LoadedModel, *, special: bool = False) -> None:
        self._model = model
        self._special = special
        self._tokens: list[int] = []
        """Tokens from the last one on that had text of its own: it decides the spacing of what follows."""
        self._shown = ""
        """Text of those tokens that was returned already."""
        self.whole = True
        """Whether no character is incomplete."""

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
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
    """Checks the text of one answer for stop texts."""

    def __init__(self, model: LoadedModel, texts: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(model)
        self._texts = texts
        self._longest = max(len(text) for text in texts)
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        """Add the next token; return whether it completes one of the texts."""
        added = self._detokenizer.add(token)
        tail = self._tail + added
        self._tail = tail[-(self._longest - 1) :] if self._longest > 1 else ""
        return any(text in tail for text in self._texts)


class TextEnd:
    """Checks whether the text of one answer, with or without special tokens, ends with a given text.

    With `lines`, line ends may follow it in the token that completes it: many tokenizers encode `>` and newlines as one
    token.
    """

    def __init__(self, model: LoadedModel, text: str, *, special: bool = False, lines: bool = False) -> None:
        self.behind = ""
        """Line ends in the last token, after the text."""
        self._detokenizer = Detokenizer(model, special=special)
        self._text = text
        self._lines = lines
        self._tail = ""

    def complete(self, token: int) -> bool:
        """Add the next token; return whether the text ends with it, and with no part of another character."""
        text = self._tail + self._detokenizer.add(token)
        bare = text.rstrip("\r\n") if self._lines and not text.endswith(self._text) else text
        self.behind = text[len(bare) :]
        self._tail = text[-len(self._text) :]
        return self._detokenizer.whole and bare.endswith(self._text)


def answer_paths(model: LoadedModel, sampling: Sampling, ends: frozenset[int]) -> AnswerPaths | None:
    """Return the token paths that a decode may sample; None if its answers are not constrained to choices.

    Args:
        model: Model whose tokens they are.
        sampling: Its `choices`, `answer_prefix` and `max_tokens` are used.
        ends: Tokens that stop the decode or start its turn suffix; if empty, the model's own end tokens.

    Raises:
        InvalidRequestError: A text cannot be written in tokens that hold no end, `max_tokens` is too small, or a choice
            starts another and no token can end it.
    """
    if not sampling.choices or sampling.forced_token_ids is not None:
        return None
    adapter = model.adapter
    ends = frozenset(token for token in ends or adapter.end_tokens if 0 <= token < adapter.vocabulary_size)
    banned = ends | frozenset(adapter.end_tokens)
    choices = frozenset(path for choice in sampling.choices for path in _paths(model, choice, "choice", banned))
    lead = _paths(model, sampling.answer_prefix, "answer_prefix", banned) if sampling.answer_prefix else frozenset()
    paths = AnswerPaths(choices, lead, ends, sampling.max_tokens)
    if paths.needed > sampling.max_tokens:
        raise InvalidRequestError(
            f"answer_prefix and the longest choice take up to {paths.needed} tokens, but max_tokens is "
            f"{sampling.max_tokens!r}: raise it, or shorten them"
        )
    if not ends and paths.is_ambiguous():
        raise InvalidRequestError(
            f"one of the choices {sampling.choices!r} is a prefix of another, and no stop token tells them apart: pass "
            "stop_tokens"
        )
    return paths


def answer_constraint(model: LoadedModel, sampling: Sampling, paths: AnswerPaths) -> ChoiceConstraint:
    """Return the constraint of one decode to these paths."""
    if not paths.lead:
        return ChoiceConstraint(paths)
    stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
    return ChoiceConstraint(paths, TextEnd(model, sampling.answer_prefix).complete, stop)


def _paths(model: LoadedModel, text: str, name: str, banned: frozenset[int]) -> frozenset[Path]:
    """Return the tokens of a text with and without a space before it.

    Headers end without a space, which most tokenizers encode as part of the next word and some add by themselves.
    """
    written: dict[Path, str] = {}
    for spelled in (text, f" {text}"):
        try:
            path = tuple(model.encode(PromptText.plain(spelled)))
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(f"cannot tokenize the {name} {text!r}: {error}") from error
        if path:
            written[path] = model.decode(list(path), special=False)
    # Special tokens have no text: a path with one of them decodes to another text, as does a normalised one.
    size = model.adapter.vocabulary_size
    faithful = [path for path, decoded in written.items() if decoded.endswith(text) and max(path) < size]
    if not faithful:
        raise InvalidRequestError(
            f"the {name} {text!r} cannot be forced: its tokens decode to {sorted(written.values())!r}; use a text "
            "without special tokens that the tokenizer does not change"
        )
    allowed = frozenset(path for path in faithful if banned.isdisjoint(path))
    if not allowed:
        raise InvalidRequestError(
            f"the {name} {text!r} cannot be forced: it contains a token that ends the message; leave it out, or choose "
            "other stop_tokens or another turn_suffix"
        )
    return allowed


@dataclass(frozen=True)
class ConstrainedDecode:
    """Constraint on the answers of a call, with a new state for each."""

    longest: int
    """Most tokens that are sampled."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    make: Callable[[], AnswerConstraint]
    """Makes the constraint of a new answer."""


def constrained_answer(
    model: LoadedModel, call: Decode, stops: frozenset[int], compiled: Callable[[Grammar], MakeConstraint]
) -> ConstrainedDecode | None:
    """Return the constraint on a call's answers; None if there is none, or its tokens are forced.

    Args:
        model: Model whose tokens they are.
        call: Decode with at most one constraint.
        stops: Tokens that stop the decode or start its turn suffix; if empty, the model's own end tokens.
        compiled: Compiles a grammar.

    Raises:
        GrammarError: The sampling's constraint cannot be followed; the message says why.
        InvalidRequestError: There is more than one constraint, or an impossible one; the extra `guided` is missing.
    """
    if call.constraint is not None:
        _require_alone(call.constraint, call.sampling)
    return None if call.sampling.forced_token_ids is not None else _constrain_sampled(model, call, stops, compiled)


def ends_replay(
    model: LoadedModel,
    call: Decode,
    stops: frozenset[int],
    compiled: Callable[[Grammar], MakeConstraint],
    answer: Sequence[int],
) -> bool:
    """Return whether a replayed answer was ended by the call's constraint, and not by `max_tokens`.

    Args:
        model: Model whose tokens they are.
        call: Decode with the constraint.
        stops: As for `constrained_answer`.
        compiled: As for `constrained_answer`.
        answer: Tokens without thoughts.
    """
    sampling = call.sampling
    if len(answer) < sampling.max_tokens or (call.constraint is None and sampling.constraint is None):
        return False
    try:
        led = _constrain_sampled(model, call, stops, compiled)
        assert led is not None
        constraint = led.make()
        for number, token in enumerate(answer, start=1):
            constraint.take(token)
            if constraint.done:
                return number == len(answer) and not constraint.cut
    except (GrammarError, ConstraintError):
        pass  # Forced tokens are taken as they are.
    return False


def _constrain_sampled(
    model: LoadedModel, call: Decode, stops: frozenset[int], compiled: Callable[[Grammar], MakeConstraint]
) -> ConstrainedDecode | None:
    """Return the constraint of an answer that is really sampled: see `constrained_answer`."""
    sampling = call.sampling
    paths = answer_paths(model, sampling, stops)
    if paths is not None:
        return ConstrainedDecode(paths.longest, paths.ends, partial(answer_constraint, model, sampling, paths))
    own = call.constraint
    ends = frozenset(t for t in stops or model.adapter.end_tokens if 0 <= t < model.adapter.vocabulary_size)
    make: Callable[[], TokenConstraint]
    if own is not None:
        make = partial(own.make, model, ends)
    elif sampling.constraint is not None:
        make = partial(compiled(sampling.constraint), ends)
    else:
        return None

    def constraint() -> AnswerConstraint:
        stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
        size, text = model.adapter.vocabulary_size, partial(model.decode, special=False)
        may_be_cut = own is not None and own.may_be_cut
        return ConstrainedAnswer(make(), sampling.max_tokens, ends, size, text, stop, may_be_cut=may_be_cut)

    return ConstrainedDecode(sampling.max_tokens, ends, constraint)


def _require_alone(constraint: Constraint, sampling: Sampling) -> None:
    if not (
        isinstance(constraint, Constraint)
        and isinstance(constraint.key, str)
        and constraint.key
        and callable(constraint.make)
    ):
        raise InvalidRequestError(f"constraint must be a Constraint with a key and a function, not {constraint!r}")
    if sampling.choices or sampling.constraint is not None:
        raise InvalidRequestError(
            f"the constraint {constraint.key!r} conflicts with the sampling: leave choices and constraint out of the "
            "sampling"
        )


class ThoughtsReader:
    """Classifies the sampled tokens of one message as thoughts, answer, or what stands between."""

    def __init__(self, model: LoadedModel, thinking: Thinking) -> None:
        self._model = model
        self._end = TextEnd(model, thinking.end, special=True, lines=True)
        self._after = thinking.after
        self._phase: Phase = "thoughts"
        self.rest: tuple[int, ...] = ()
        """Tokens still to come before the answer, once the thoughts are over; empty before."""
        self._blank_lines = 0

    def add(self, token: int) -> Phase:
        """Return the phase of the next token."""
        if self._phase == "thoughts":
            if self._end.complete(token):
                line_ends = self._end.behind
                while not self._after.text.startswith(line_ends):
                    line_ends = line_ends[:-1]
                self._phase, self.rest = "close", tuple(self._model.encode(self._after.removeprefix(line_ends)))
                return "close"
            return "thoughts"
        if self.rest and token == self.rest[0]:
            self.rest = self.rest[1:]
            return "close"
        if self._phase == "close" and self._blank_lines < BLANK_LINES and self._is_blank(token):
            self._blank_lines += 1
            return "close"
        self._phase, self.rest = "answer", ()
        return "answer"

    def _is_blank(self, token: int) -> bool:
        return self._model.decode([token]).strip(" \t") in _LINE_ENDS


def thoughts_in(model: LoadedModel, thinking: Thinking | None, sampled: Sequence[int]) -> int:
    """Return how many of these tokens come before an answer; 0 if the thoughts never end."""
    if thinking is None:
        return 0
    phases = list(map(ThoughtsReader(model, thinking).add, sampled))
    return phases.index("answer") if "answer" in phases else len(phases) * ("close" in phases)


def close_of(model: LoadedModel, thinking: Thinking) -> tuple[int, ...]:
    """Return the tokens that a model is forced to generate when its thinking budget is used up."""
    # Encoded in two parts: a model that ends its thoughts itself is forced to generate the second part only.
    return (*model.encode(PromptText.special(thinking.before + thinking.end)), *model.encode(thinking.after))


def longest_thoughts(model: LoadedModel, thinking: Thinking) -> int:
    """Return the most tokens that thoughts, and what stands between them and the answer, can take."""
    return (0 if thinking.counts else thinking.budget) + len(close_of(model, thinking)) + BLANK_LINES


def thinking_constraint(
    model: LoadedModel, sampling: Sampling, thinking: Thinking, stops: frozenset[int], led: ConstrainedDecode | None
) -> ThinkingConstraint:
    """Return the constraint that leads one decode through its thoughts to an answer.

    Args:
        model: Model whose tokens they are.
        sampling: Sampling of the answer.
        thinking: Thinking settings.
        stops: Tokens that end a message.
        led: Constraint on the answer; None: none.
    """
    if led is None:
        stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
        answer: AnswerConstraint = FreeAnswer(sampling.max_tokens, stops, stop)
    else:
        answer = led.make()
    total = sampling.max_tokens if thinking.counts else None
    budget = thinking.budget if total is None else min(thinking.budget, total)
    return ThinkingConstraint(budget, close_of(model, thinking), stops, ThoughtsReader(model, thinking), answer, total)


class PhaseTexts:
    """Splits one message's tokens into phases, and returns their text."""

    def __init__(self, model: LoadedModel, thinking: Thinking | None) -> None:
        self._model = model
        self._reader = None if thinking is None else ThoughtsReader(model, thinking)
        self._phase: Phase = "answer" if thinking is None else "thoughts"
        self._detokenizer = Detokenizer(model)

    def add(self, token: int) -> tuple[Phase, str]:
        """Return the phase and text of the next token; what stands between thoughts and answer has no text."""
        phase = self._phase if self._reader is None else self._reader.add(token)
        if phase != self._phase:
            self._phase, self._detokenizer = phase, Detokenizer(self._model)
        return phase, "" if phase == "close" else self._detokenizer.add(token)


def answer_of(model: LoadedModel, call: Decode, thought: Message) -> Prefill:
    """Return a prefill of the answer alone, at the position where its thoughts started.

    Args:
        model: Model that decoded it.
        call: Decode with thinking.
        thought: Message that was decoded for the call.
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
    """Return the index of the answer among the sampled tokens of a message with thoughts."""
    return thoughts_in(model, thinking, [chosen.token for chosen in message.chosen or ()])
