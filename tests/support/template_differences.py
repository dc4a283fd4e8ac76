"""The oracle of template rules: why what agents read differs from what the chat template writes of it.

A difference is explained by being undone: a view is written anew as the template has it in one respect after another,
until its tokens are the template's. What each step changes is that respect's difference; what is left has no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path
from typing import Any

from choreo_agents.models.chat.format import ChatFormat
from choreo_agents.models.chat.template import Template
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.checking import ViewComparison
from choreo_agents.models.checking.comparing import compare_view, to_turns, variants
from choreo_agents.models.checking.talk import QUESTION, View, views
from choreo_agents.models.checkpoint import Checkpoint
from choreo_agents.models.safe_tokenization import SafeTokenizer, safe_tokenizer
from support.template_renderings import ALTERNATIVES, AnswerPlaces, Reason, Rendering, Undone

_Alternative = tuple[str, object, Reason]
_NOTHING = Undone()
_MOST_STEPS = 6
"""How many reasons a view may have at once: more are not tried."""


@dataclass(frozen=True)
class TemplateDifference:
    """What stands otherwise for one reason."""

    reason: Reason
    places: Sequence[tuple[str, str]] = ()
    """What stands here, and what the template has there; none if it was given other messages instead."""


@dataclass(frozen=True)
class ExplainedView:
    """A view beside the template's own, with all that differs."""

    compared: ViewComparison
    differences: Sequence[TemplateDifference]

    @property
    def explained(self) -> bool:
        """Whether all that differs has a reason."""
        return all(each.reason is not Reason.UNKNOWN for each in self.differences)

    @property
    def text(self) -> str:
        """What the model reads."""
        return "".join(text for _, text in self.compared.messages)

    @property
    def names(self) -> set[str]:
        """Of the reasons."""
        return {each.reason.name.lower() for each in self.differences}


@dataclass(frozen=True)
class Given:
    """What a template makes of a view."""

    text: str
    merged: bool
    """Whether it was given what others say as a user's."""
    reasons: Sequence[Reason]
    """Why it was not given the view as it is."""


def explained_views(folder: Path, options: Mapping[str, Any]) -> list[ExplainedView]:
    """All that agents read of the talk, over both kinds of edges, by a model's small files.

    Args:
        folder: Of the files.
        options: Variables of its chat template, and `date`.
    """
    tokenizer = Checkpoint.read(str(folder), folder).tokenizer()
    comparing = Comparing(chat_format(tokenizer, options), Template(tokenizer, options), safe_tokenizer(tokenizer))
    return [comparing.compare(view) for again in (False, True) for view in views(encodes_again=again)]


class Comparing:
    """One model's views, and its template's.

    Args:
        chat: How the model writes turns.
        template: What they were taken from.
        spelling: Of its tokenizer.
    """

    def __init__(self, chat: ChatFormat, template: Template, spelling: SafeTokenizer) -> None:
        self.chat, self.template, self.spelling = chat, template, spelling
        self.tokenizer = template.tokenizer

    def compare(self, view: View) -> ExplainedView:
        """A view beside the template's."""
        found = compare_view(self.chat, self.template, self.spelling, view)
        assert list(found.tokens) == self._tokens(Rendering(self.chat, view, None)), "nothing is undone"
        given = self._given(view)
        assert found.template_text == (None if given is None else given.text)
        if given is None or found.template_tokens is None:
            return ExplainedView(found, ())
        return ExplainedView(found, self._differences(view, given, list(found.template_tokens)))

    def _given(self, view: View) -> Given | None:
        """What `written` has found, and how; None if it raises whatever it is given, or if there is no template."""
        for told, merged in variants(self.chat, view) if self.tokenizer.chat_template is not None else ():
            text = self.template.render(to_turns(self.chat, view, told, merged), answer=view.open)
            if text is not None:
                reasons = {"system": [], "no system": [Reason.NO_SYSTEM]}.get(told, [Reason.LATER_RAISES])
                return Given(text, merged, reasons)
        return None

    def _differences(self, view: View, given: Given, wanted: list[int]) -> list[TemplateDifference]:
        places = self._answer_places(view)

        def rendered(undone: Undone) -> Rendering:
            return Rendering(self.chat, view, places, undone)

        told = [TemplateDifference(reason) for reason in given.reasons]
        found: list[TemplateDifference] = []
        named = "dropped" if self.chat.assistant.named is not None else "header"
        possible = [each for each in ALTERNATIVES if each[:2] != ("names", named)]
        steps = _fewest(possible, lambda undone: rendered(undone).text.text, given)
        before = self._tokens(rendered(_NOTHING))
        for number, (_, _, reason) in enumerate(steps, start=1):
            after = self._tokens(rendered(_taken(steps[:number])))
            found.append(TemplateDifference(reason, self._places(before, after)))
            before = after
        undone = _taken(steps)
        whole = self.spelling.encode(rendered(undone).text)
        for after, reason in ((whole, Reason.JOINTS), (wanted, Reason.UNKNOWN)):
            # Tokens across messages count only if they explain what is left.
            if before != after and (reason is Reason.UNKNOWN or whole == wanted):
                found.append(TemplateDifference(reason, self._places(before, after)))
                before = after
        return told + [each for each in found if each.places]

    def _answer_places(self, view: View) -> AnswerPlaces | None:
        around = self.template.around
        question = {"role": "user", "content": QUESTION}
        answer, next_answer = ({"role": "assistant", "content": f"\u241fanswer{number}\u241f"} for number in (1, 2))
        last = around([question, answer], answer=view.open)
        if last is None:
            return None
        two = around([question, answer, next_answer])
        behind_another = None if two is None else two[2].removeprefix(self.chat.turn_end)
        opening, goes_on = last[1].removeprefix(self.chat.user.after), bool(self.chat.turn_end) and not last[2]
        return AnswerPlaces(opening, last[2], behind_another, goes_on)

    def _tokens(self, rendering: Rendering) -> list[int]:
        return [
            token
            for message in rendering.messages()
            for piece in message.pieces
            for token in self.spelling.encode(piece)
        ]

    def _places(self, one: Sequence[int], other: Sequence[int]) -> list[tuple[str, str]]:
        matcher = SequenceMatcher(None, one, other, autojunk=False)
        changed = [code[1:] for code in matcher.get_opcodes() if code[0] != "equal"]
        return [(self._read(one[a:b]), self._read(other[c:d])) for a, b, c, d in changed]

    def _read(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*tokens], clean_up_tokenization_spaces=False))


def _fewest(possible: Sequence[_Alternative], text_of: Callable[[Undone], str], given: Given) -> Sequence[_Alternative]:
    """The fewest steps after which a text is the template's; if there are none, those that come nearest."""
    forced = [each for each in possible if each[0] == "merged" and given.merged]
    start = _taken(forced)
    plain = text_of(start)
    # What it was not given as later instructions it cannot have written otherwise as such.
    never = {"merged", "later"} if given.reasons else {"merged"}
    others = [each for each in possible if each[0] not in never]
    # Some alternatives change something only beside others.
    late = {"header", "last_opening", "last_end"}
    counting = [each for each in others if each[0] in late or text_of(_taken([*forced, each])) != plain]
    nearest: tuple[int, Sequence[_Alternative]] | None = None
    for steps in _subsets(counting):
        text = text_of(_taken([*forced, *steps]))
        if text == given.text:
            return [*forced, *steps]
        left = _unlike(text, given.text)
        if nearest is None or left < nearest[0]:
            nearest = left, [*forced, *steps]
    return forced if nearest is None else nearest[1]


def _subsets(alternatives: Sequence[_Alternative]) -> Iterator[Sequence[_Alternative]]:
    """What can be chosen together, the fewest first."""
    for count in range(min(len(alternatives), _MOST_STEPS) + 1):
        for chosen in combinations(alternatives, count):
            if len({name for name, _, _ in chosen}) == count:
                yield chosen


def _taken(alternatives: Sequence[_Alternative]) -> Undone:
    changes: dict[str, Any] = {name: value for name, value, _ in alternatives}
    return replace(_NOTHING, **changes)


def _unlike(one: str, other: str) -> int:
    """How many characters stand between what two texts begin and end with."""
    start = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    rest, more = one[start:], other[start:]
    end = next((at for at, (a, b) in enumerate(zip(rest[::-1], more[::-1], strict=False)) if a != b), None)
    end = min(len(rest), len(more)) if end is None else end
    return len(rest) + len(more) - 2 * end
