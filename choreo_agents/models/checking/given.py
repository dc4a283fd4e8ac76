"""A view as the messages that a chat template is given: as they are, or as far as it takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from choreo_agents.models.chat.thinking import FIELDS
from choreo_agents.models.checking.reasons import Reason
from choreo_agents.models.checking.talk import PARTED, QUESTION, TalkTurn, View

if TYPE_CHECKING:
    from choreo_agents.models.chat import ChatFormat
    from choreo_agents.models.chat.template import Template, Turn

_Told = Literal["system", "user", "before the question", "no system"]
"""Where the reader's own instructions stand: in a turn of theirs, or in a user's; the last, all of them."""


@dataclass(frozen=True)
class Given:
    """What a template makes of a view."""

    text: str
    merged: bool
    """Whether it was given what others say as a user's."""
    reasons: Sequence[Reason]
    """Why it was not given the view as it is."""


def written(template: Template, chat: ChatFormat, view: View) -> Given | None:
    """A view in the template's own words; None if it raises whatever it is given."""
    for told, merged in _ways(chat, view):
        text = template.render(_messages(chat, view, told, merged=merged), answer=view.open)
        if text is not None:
            reasons = {"system": [], "no system": [Reason.NO_SYSTEM]}.get(told, [Reason.LATER_RAISES])
            return Given(text, merged, reasons)
    return None


def _ways(chat: ChatFormat, view: View) -> Iterator[tuple[_Told, bool]]:
    places: tuple[_Told, ...] = ("system", "user", "before the question", "no system")
    first = view.encodes_again and chat.merges is not None
    for merged in (first, not first):
        if merged and chat.merges is None:
            continue
        for told in places if view.instructions else places[:1]:
            yield told, merged


def _messages(chat: ChatFormat, view: View, told: _Told, *, merged: bool) -> list[Turn]:
    parted = chat.merges or PARTED
    turns: list[Turn] = []
    asked = QUESTION
    if view.instructions and told == "no system":
        asked = parted.join([*view.instructions, QUESTION])
    elif view.instructions:
        public, own = view.instructions
        turns.append({"role": "system", "content": public})
        if told == "before the question":
            asked = f"{own}{parted}{QUESTION}"
        else:
            turns.append({"role": told, "content": own})
    turns.append({"role": "user", "content": asked})
    for said in view.said:
        if not merged or said.name == view.reader:
            turns.append(_answer(chat, said))
        elif turns[-1]["role"] == "user":
            turns[-1] = turns[-1] | {"content": f"{turns[-1]['content']}{parted}{said.name}: {said.words}"}
        else:
            turns.append({"role": "user", "content": f"{said.name}: {said.words}"})
    return turns


def _answer(chat: ChatFormat, said: TalkTurn) -> Turn:
    thinks = chat.thoughts is not None and chat.thoughts.usual
    thoughts: dict[str, Any] = dict.fromkeys(FIELDS, said.thoughts) if thinks else {}
    return {"role": "assistant", "content": said.words, "name": said.name} | thoughts
