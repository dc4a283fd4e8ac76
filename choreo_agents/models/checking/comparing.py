"""Compares the views of agents with the chat template's rendering of the same messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from choreo_agents.models.chat.thinking import FIELDS
from choreo_agents.models.checking.rendering import view_messages
from choreo_agents.models.checking.talk import QUESTION, SEPARATOR, TalkTurn, View

if TYPE_CHECKING:
    from choreo_agents.models.chat.format import ChatFormat
    from choreo_agents.models.chat.template import Template, Turn
    from choreo_agents.models.safe_tokenization import SafeTokenizer

InstructionPlace = Literal["system", "user", "before the question", "no system"]
"""Place of the reader's own instructions: a system or user turn, or the question; the last: all in the question."""


@dataclass(frozen=True)
class ViewComparison:
    """A view as the model reads it, and as the template renders it."""

    view: View
    messages: Sequence[tuple[str, str]]
    """Label and text of each message."""
    tokens: Sequence[int]
    template_text: str | None
    """None: there is no template, or it raises for every variant of the conversation."""
    template_tokens: Sequence[int] | None

    @property
    def equal(self) -> bool:
        """True if both have the same tokens."""
        return self.template_tokens is not None and [*self.tokens] == [*self.template_tokens]

    def as_object(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "title": self.view.title,
            "edges": self.view.edges,
            "messages": [{"of": label, "text": text} for label, text in self.messages],
            "tokens": [*self.tokens],
            "template_text": self.template_text,
            "template_tokens": None if self.template_tokens is None else [*self.template_tokens],
            "equal": self.equal,
        }


def compare_view(chat: ChatFormat, template: Template, tokenizer: SafeTokenizer, view: View) -> ViewComparison:
    """Compare a view with the template's rendering.

    Args:
        chat: The model's chat format.
        template: The template that it was derived from.
        tokenizer: The model's safe tokenizer.
        view: The view.
    """
    read = view_messages(chat, view)
    messages = [(message.label, message.text.text) for message in read]
    tokens = [token for message in read for piece in message.pieces for token in tokenizer.encode(piece)]
    text = None if template.tokenizer.chat_template is None else render_view(template, chat, view)
    expected = None if text is None else list(template.tokenizer.encode(text, add_special_tokens=False))
    return ViewComparison(view, messages, tokens, text, expected)


def render_view(template: Template, chat: ChatFormat, view: View) -> str | None:
    """Render a view with the template, in the first variant that it accepts; None if it raises for all."""
    texts = (template.render(to_turns(chat, view, *variant), answer=view.open) for variant in variants(chat, view))
    return next((text for text in texts if text is not None), None)


def variants(chat: ChatFormat, view: View) -> Iterator[tuple[InstructionPlace, bool]]:
    """Yield places of the reader's instructions and whether others are in a user's turn, the closest variant first."""
    places: tuple[InstructionPlace, ...] = ("system", "user", "before the question", "no system")
    orders = (view.encodes_again, not view.encodes_again) if chat.merges is not None else (False,)
    for merged in orders:
        for place in places if view.instructions else places[:1]:
            yield place, merged


def to_turns(chat: ChatFormat, view: View, place: InstructionPlace, merged: bool) -> list[Turn]:
    """Return a view as a template's messages, in one of the `variants`."""
    parted = chat.merges or SEPARATOR
    turns: list[Turn] = []
    question = QUESTION
    if view.instructions and place == "no system":
        question = parted.join([*view.instructions, QUESTION])
    elif view.instructions:
        public, own = view.instructions
        turns.append({"role": "system", "content": public})
        if place == "before the question":
            question = f"{own}{parted}{QUESTION}"
        else:
            turns.append({"role": place, "content": own})
    turns.append({"role": "user", "content": question})
    for turn in view.turns:
        if not merged or turn.name == view.reader:
            turns.append(_answer(chat, turn))
        elif turns[-1]["role"] == "user":
            turns[-1] = turns[-1] | {"content": f"{turns[-1]['content']}{parted}{turn.name}: {turn.words}"}
        else:
            turns.append({"role": "user", "content": f"{turn.name}: {turn.words}"})
    return turns


def _answer(chat: ChatFormat, turn: TalkTurn) -> Turn:
    thinks = chat.thoughts is not None and chat.thoughts.usual
    thoughts: dict[str, Any] = dict.fromkeys(FIELDS, turn.thoughts) if thinks else {}
    return {"role": "assistant", "content": turn.words, "name": turn.name} | thoughts
