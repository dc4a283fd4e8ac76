"""Where the thoughts of a model that thinks before it answers end, and its answer begins."""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.engine.calls import Thinking
from choreo_agents.engine.decoding.detokenizer import Detokenizer, TextEnd, TextStop
from choreo_agents.engine.decoding.leading import LedAnswer
from choreo_agents.models import FramedText, LoadedModel
from choreo_agents.sampling import BLANK_LINES, FreeAnswer, Guide, Phase, Sampling, ThoughtsGuide

_LINE_ENDS = ("\n", "\n\n", "\r\n", "\n\n\n")


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
