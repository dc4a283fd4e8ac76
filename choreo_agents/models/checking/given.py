"""A view as the messages that a chat template is given: as they are, or as far as it takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from choreo_agents.models.chat.thinking import FIELDS
from choreo_agents.models.checking.talk import PARTED, QUESTION, TalkTurn, View

if TYPE_CHECKING:
    from choreo_agents.models.chat import ChatFormat
    from choreo_agents.models.chat.template import Template, Turn

Told = Literal["system", "user", "before the question", "no system"]
"""Where the reader's own instructions stand: in a turn of theirs, or in a user's; the last, all of them."""


def written(template: Template, chat: ChatFormat, view: View) -> str | None:
    """A view in the template's own words; None if it raises whatever it is given."""
    texts = (template.render(given_as(chat, view, *way), answer=view.open) for way in ways(chat, view))
    return next((text for text in texts if text is not None), None)


def ways(chat: ChatFormat, view: View) -> Iterator[tuple[Told, bool]]:
    """Where the reader's instructions may stand, and whether others speak in a user's turn: the nearest to it first."""
    places: tuple[Told, ...] = ("system", "user", "before the question", "no system")
    orders = (view.encodes_again, not view.encodes_again) if chat.merges is not None else (False,)
    for merged in orders:
        for told in places if view.instructions else places[:1]:
            yield told, merged


def given_as(chat: ChatFormat, view: View, told: Told, merged: bool) -> list[Turn]:
    """A view as a template's messages, in one of the `ways`."""
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
