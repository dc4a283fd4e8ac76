"""Sets what agents read beside what the chat template writes of it, as they are or as far as it takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from choreo_agents.models.chat.thinking import FIELDS
from choreo_agents.models.checking.rendering import Rendering
from choreo_agents.models.checking.talk import PARTED, QUESTION, TalkTurn, View

if TYPE_CHECKING:
    from choreo_agents.models.chat import ChatFormat
    from choreo_agents.models.chat.template import Template, Turn
    from choreo_agents.models.safe_tokenization import SafeTokenizer

Told = Literal["system", "user", "before the question", "no system"]
"""Where the reader's own instructions stand: in a turn of theirs, or in a user's; the last, all of them."""


@dataclass(frozen=True)
class ViewComparison:
    """A view as the model reads it, beside the template's own."""

    view: View
    messages: Sequence[tuple[str, str]]
    """Whose each message is, and its text."""
    tokens: Sequence[int]
    template_text: str | None
    """None if it has none, or raises at any such conversation."""
    template_tokens: Sequence[int] | None

    @property
    def equal(self) -> bool:
        """Token by token."""
        return self.template_tokens is not None and [*self.tokens] == [*self.template_tokens]

    def as_object(self) -> dict[str, Any]:
        """JSON-plain."""
        return {
            "title": self.view.title,
            "edges": self.view.edges,
            "messages": [{"of": label, "text": text} for label, text in self.messages],
            "tokens": [*self.tokens],
            "template_text": self.template_text,
            "template_tokens": None if self.template_tokens is None else [*self.template_tokens],
            "equal": self.equal,
        }


def compared(chat: ChatFormat, template: Template, spelling: SafeTokenizer, view: View) -> ViewComparison:
    """A view beside the template's.

    Args:
        chat: How the model writes turns.
        template: What they were taken from.
        spelling: Of its tokenizer.
        view: What is read.
    """
    read = Rendering(chat, view).messages()
    messages = [(message.label, message.text.text) for message in read]
    tokens = [token for message in read for piece in message.pieces for token in spelling.encode(piece)]
    text = None if template.tokenizer.chat_template is None else written(template, chat, view)
    wanted = None if text is None else list(template.tokenizer.encode(text, add_special_tokens=False))
    return ViewComparison(view, messages, tokens, text, wanted)


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
